"""Deployment recipes read as text: what `rankfold recipe lint` and `recipe diff` do.

A recipe (srt-slurm's layout 1) or an entry of a master configuration is read safely and strictly,
with the line and column of everything in it, and rules say where it does not mean what it says.
Nothing is run, and neither vLLM nor torch is imported.

`loader` reads YAML, `schema` and `master_schema` say which keys there are, `view` and `master` are
what the rules see, `rules/` has one file for each subject, `lint` runs them, `diff` compares two.
"""
