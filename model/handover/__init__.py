"""Handing a request's KV caches over from the ranks that prefilled it to those that decode it.

| file | what it is |
|---|---|
| layout.py | which heads of which layers a rank's caches hold |
| cells.py | what has to go from which rank to which |
| transfer.py | one request's hand-over: what has arrived, and what of it counts |
| wire.py | what carries the pieces, and may lose, repeat, delay and reorder them |

Both sides have pages of their own, and may have other degrees of parallelism, other sizes of pages
and other stages: pieces are named by layer, head and token, which mean the same on both.
"""
