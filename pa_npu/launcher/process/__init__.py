"""The process tree of one machine: commands, start, supervision, recovery, clean end."""
