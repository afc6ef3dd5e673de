"""The rules: one file for each subject, each a pure function from what was read to findings.

`RULES` says for each name, in one sentence, what a finding of it means.
"""

RULES: dict[str, str] = {
    "unknown-key": "A key that the schema does not have.",
    "missing-key": "A key without which a recipe or an entry does not start.",
    "wrong-type": "A value of another type than its key has.",
    "unknown-value": "A word that is nearly one that its key has.",
    "unknown-flag": "A flag that is nearly one that vLLM has.",
    "flag-value": "A flag whose value vLLM cannot read, or that is written twice.",
    "nodes": "Workers, GPUs and nodes do not add up.",
    "parallel-size": "A worker's flags make another number of ranks than it has GPUs.",
    "name": "The name says another topology, load or precision than the configuration.",
    "file-name": "The file's name says another topology, load or precision.",
    "stale-comment": "A comment describes another topology than the configuration.",
    "concurrency": "The load has more requests than the decode side runs at a time.",
    "limits": "Lengths and limits that vLLM refuses, or that cut requests off.",
    "handover": "Prefill and decode cannot hand over the KV cache to each other.",
    "version": "Versions or images disagree between router, recipe and runtime.",
    "setup-script": "The recipe names a set-up script that is not there.",
    "engine-patch": "The recipe changes the engine that its image has.",
    "config-file": "The entry names a recipe that does not exist.",
    "entry": "The entry and the recipe that it names disagree.",
    "allow": "A comment that should allow a finding, and cannot be read.",
}
