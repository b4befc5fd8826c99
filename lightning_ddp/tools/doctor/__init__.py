"""Doctor: checks that a machine and its ranks are fit for a distributed run.

* `command`: options, the order of things, text and JSON, the exit status;
* `placement`: who started this process and as which rank, from the environment variables;
* `facts`: what this process sees of its machine; `network`: names, interfaces, the store, with deadlines;
* `measure`: what ranks do together: clocks, all-reduce, and the line through its times;
* `checks`: pure functions from all that to findings;
* `verify`: trains and compares; `trials`: what each rank does; `references`: what should come out.
"""
