"""One module per sub-command of `pa-npu`, named in the table of pa_npu.launcher.cli and imported only when it is called."""
