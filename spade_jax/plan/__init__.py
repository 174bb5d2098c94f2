"""`spade-jax plan`: what a run needs on devices that may not be here.

`topology` describes the devices, `programs` compiles what the run would run on them, `memory` adds
up what a chip holds in each phase, `work` counts what a step computes and reads, and `command` puts
it together and judges. Nothing is executed but, for this machine's processors, a measurement of how
fast they are. The checkpoint's own moves, the environments and what else a process needs on its
host are not planned.
"""
