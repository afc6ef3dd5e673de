#!/usr/bin/env bash
# Changes the engine: what `engine-patch` finds.
sed -i 's/capacity = 1/capacity = 2/' /usr/lib/python3/dist-packages/vllm/moe.py
