"""Telemetry: from a rank's memory-mapped file to the node's one Prometheus endpoint, and into an event log.

A rank never runs a server. It hands one `StepRecord` of host values to its sinks after every step; a sink that fails
warns once and falls silent, because telemetry must never stop or slow training.
"""
