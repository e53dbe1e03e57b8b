"""Weights from trainers to engines: both ends, what they say to each other, and the transport.

Empty of imports: the engine process imports `pa_npu.publish.transport` where only torch and the engine are installed.
"""
