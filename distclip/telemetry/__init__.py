"""Telemetry: from a rank's memory-mapped file to the node's one Prometheus endpoint, and into an event log.

A rank never runs a server. It hands one `StepRecord` of host values to its sinks after every step; a sink that fails
warns once and falls silent, because telemetry must never stop or slow training.

    in a rank       record -> sinks -> tally (counts) -> spool (a file of the form in layout)
                                    -> events (JSON lines)
    in the agent    folder (of the files) -> ledger (adds up over restarts) -> node (and what the launcher says)
                    -> collector (builds the metrics of catalogue) -> server; exporter holds all of it together
    for Prometheus  discovery (where the endpoint is)
    both            settings (the environment)

docs/telemetry.md is the page for users.
"""
