"""SGLang as a backend: starts a server that runs ``sglang_plugin``, or attaches to one, and measures it over HTTP.

``backend`` is the scenario's; ``api`` speaks to a server, ``process`` starts one as ``launching`` says; ``resolved``
holds what it made of its arguments against the scenario; ``asking`` makes requests of the workload, ``traffic`` sends
them, while ``collector`` reads the server's steps and ``training`` has its drafter trained; ``tables`` makes records of
that, ``counters`` looks for traffic of others, ``said`` has words. None of them imports SGLang: it may live in another
environment, or on another machine.
"""
