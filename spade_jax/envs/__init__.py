"""Environments: generated programs run in confined worker processes, never in the trainer's.

    trainer (`pool.Pool`) -> supervisor -> zygotes -> a worker per program -> several instances

Reading order: `api` (what a program must be and what its replies may hold), `pool` (the interface
of the trainer), `admit` (which programs are played at all), then the process side, standard library
only: `wire`, `limits`, `supervisor`, `zygote`, `worker`, and the walls of a worker: `confine`
(their order), `landlock`, `seccomp`, `probe` (what they are worth here), `tier` (how that is told).
`link` joins the two sides; `hostile` attacks the walls. The process side imports this package too,
so nothing is imported here.
"""
