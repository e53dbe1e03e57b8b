"""Telemetry: iteration metrics, throughput (TPSPD), timeline, progress line, logs and summaries."""
