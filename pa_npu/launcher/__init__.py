"""The launcher: starts, watches and stops the process tree of a run (`python -m pa_npu.launcher run|doctor`)."""
