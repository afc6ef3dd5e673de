"""The kill matrix: each known fault against all checks.

| file | what it is |
|---|---|
| trial.py | one fault: is it caught, by what, where, how fast, and in how small an example |
| matrix.py | all of them, and the negative controls |
| report.py | the matrix as data, on the terminal, and as a page of the docs |
"""
