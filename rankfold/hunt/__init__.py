"""The hunt: a search for an example that fails, over all that a step depends on.

| file | what it is |
|---|---|
| space.py | what is drawn, as Hypothesis strategies |
| search.py | one worker's search: draw, examine, shrink |
| workers.py | several workers as processes |
| tally.py | what was drawn, so that a silent narrowing of the search shows |
| exhaustive.py | every case of a bounded scope, in a fixed order |
| resume.py | which of them are done, in a file |
| report.py | what a hunt found, as data and on the terminal |
"""
