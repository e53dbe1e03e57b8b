"""The Python interface: a run as an object, with rewards and datasets that are objects of the caller.

It sits above the launcher, which it starts as a process of its own: engines, trainers and signals of a run then never meet the
caller's interpreter, which may be a notebook, and a run that fails takes nothing down with it.
"""
