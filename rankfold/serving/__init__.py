"""Requests: prompts that come in chunks, and tokens that are decoded one a step.

| file | what it is |
|---|---|
| request.py | requests, and requests of telling lengths from a seed |
| plan.py | the steps: which request brings how many tokens into which |
| sampling.py | the next token from logits, greedy or seeded |
| drive.py | the plan on a rig: feeds tokens, takes outcomes, samples |
| truth.py | the reference's run of the whole sequences, and its rows for each step |
| judge.py | all checks of all steps |
| compare.py | what two topologies have made of the same requests |
"""
