"""One iteration in virtual time: how long a schedule would take, and which schedule to choose."""
