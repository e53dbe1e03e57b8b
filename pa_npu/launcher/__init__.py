"""The launcher: starts, watches and stops the process tree of a run (`pa-npu run|doctor`)."""
