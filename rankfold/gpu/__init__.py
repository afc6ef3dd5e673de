"""The gated GPU job: what can run here over NCCL, and what full-scale runs elsewhere have given.

| file | what it is |
|---|---|
| inventory.py | what this machine has |
| plan.py | which topologies and variants are run, and on which transport |
| record.py | what the launched ranks do for it, and what they write down |
| launch.py | starts torchrun |
| folded.py | the same steps on folded ranks |
| compare.py, rows.py | the verdicts |
| fullscale.py | the commands of the full-scale validation |
| readers.py | reads what those commands have written |
| judged.py, thresholds.py | the verdicts on it, and the thresholds |
| run.py, report.py | the job, and its report |
"""
