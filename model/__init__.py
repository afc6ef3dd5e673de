"""The real vLLM MiniMax-M3 on CPU: platform, leaf kernels, tiny checkpoints, stage driver.

Importing this package does not import vLLM; `model.plugin.activate` (or anything that calls it)
must run before vLLM's own model code is imported. What is replaced in vLLM, and why, is one table:
`model.overrides`.
"""
