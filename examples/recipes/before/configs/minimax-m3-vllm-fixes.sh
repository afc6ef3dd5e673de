#!/usr/bin/env bash
# Two fixes that the image of June does not have. Both change vLLM where it is installed.
set -euo pipefail
vllm=$(python3 -c 'import vllm, pathlib; print(pathlib.Path(vllm.__file__).parent)')
sed -i 's/force_oneshot_support = False/force_oneshot_support = True/' \
  "$vllm/distributed/device_communicators/flashinfer_all_reduce.py"
sed -i 's/topk_indices = top_k\[:n\]/topk_indices = top_k[:n].contiguous()/' \
  "$vllm/models/minimax_m3/msa.py"
