"""Many agents in one process, in simulated time: what ``bench/scale.py --simulate`` runs.

    virtual_time   an event loop on which every agent has a processor and a clock of its own
    accounts       what one agent has sent, read and computed
    redis_server   one real Redis behind simulated connections
    network        links between agents without sockets
    data_plane     streams that move no bytes
    caches         what Etha keeps in its modules, for each agent by itself
    workers        workers that ask their agents over a simulated bus
    fleet          starts the agents and runs the phases
    report         tables
    link_cost      measures what links between sockets cost

Real: ``etha.agent`` with its services and state machines, ``etha.store`` with redis-py, the scripts in Redis, the
codecs of the bus and of links, planning, and compiling. Their processor time is measured.

Not real, or left out:

- Sockets. Of the kernel, ZeroMQ and CURVE only links and their messages have a cost, which is a constant. Redis is
  reached over one local socket, and its network has a bandwidth; those of agents have none.
- Bytes of tensors: a run of a transfer is over after one message delay.
- Threads: what an agent does in a thread, it does on its loop's processor.
- What a process pays once: imports, cold code, the start of threads. A real agent uses more time for its first calls.
- Deaths and leases: nobody ends, and leases last longer than the run. Beats are simulated.
- The garbage collector is off while a phase runs.
"""
