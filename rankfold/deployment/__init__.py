"""Deployments: workers of several topologies that serve requests together.

| file | what it is |
|---|---|
| fleet.py | which workers there are, and the word for it, such as 3p1d-dep2-dep16 |
| load.py | requests of mixed lengths from a seed |
| lane.py | one DP rank of one worker: its requests, its batches, what came out |
| router.py | which lane takes a request next |
| handing.py | the hand-overs that are under way between lanes |
| drive.py | rounds of steps and hand-overs, until every request is served |
| truth.py | what every step of every lane has to be |
| judge.py | all checks of all lanes, put together |
| check.py | the whole, with its report; report.py and render.py show it |
"""
