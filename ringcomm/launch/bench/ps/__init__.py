"""`ringcomm bench ps`: what a push and a pull take, beside torch.distributed.rpc.

command.py reads the command line and runs. cases.py says what is pushed and pulled, work.py does
it and takes the time, in a worker (ours.py) or in a process of another library (peer.py, child.py);
runner.py lets them take turns. goals.py holds the result against what is asked, report.py shows it.
"""
