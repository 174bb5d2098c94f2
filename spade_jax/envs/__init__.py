"""Environments: generated programs run in confined worker processes, never in the trainer's.

    trainer (`pool.Pool`) -> supervisor -> zygotes -> a worker per program -> several instances

Reading order: `api` (what a program must be and what its replies may hold), `pool` (the interface
of the trainer) with `quarantine`, `admit` (which programs are played at all), then the process
side, standard library only: `wire`, `limits`, `supervisor` with `nursery` and `verdicts`, `zygote`,
`worker`, and the walls of a worker: `confine` (their order), `landlock`, `seccomp`, `probe` (what
they are worth here), `tier` (how that is told). `link` joins the two sides; `hostile` attacks the
walls. `adapters` plays public environments, `spade_pools` reads and writes folders of programs.
Programs that are played by calling tools build on `tool_task` (`tool_calls` reads completions,
`tool_schema` checks arguments, `tool_gate` is their gate of admission; `tool_use_base_env` is for
SPADE's programs). The process side imports this package too, so nothing is imported here.
"""
