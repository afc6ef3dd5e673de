"""Stand-in programs, each right as it stands; the faults of `properties.faults` patch them.

| file | what it is |
|---|---|
| tiny.py | the tiny model that they compute: weights, tokens, float64 truth and bounds |
| gather_scatter.py | attention DP and expert parallelism by all-gather and reduce-scatter |
| communicator.py | a layer communicator that reduces on behalf of its layers |
| all_to_all.py | attention DP and expert parallelism by all-to-all, tokens split over TP |
| row_parallel.py | row-parallel linear layers with a bias, and norms behind them |
"""
