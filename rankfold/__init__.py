"""rankfold: run the real MiniMax-M3 on N ranks folded into one process, and check every collective.

This package is the command line on top of ``sim`` (the folded runtime), ``reference`` (the float64
truth), ``model`` (vLLM's MiniMax-M3 on CPU) and ``properties`` (the checks). It stays light on
purpose: importing it must load neither torch nor vLLM.
"""

from rankfold.declare import replicated

__all__ = ["replicated"]
__version__ = "0.1.0"
