"""`ringcomm bench` with further engines, and a picture."""

import importlib.util

from bench.mpi_and_torch import PEERS

import ringcomm as rc
from ringcomm.errors import ConfigError
from ringcomm.launch.bench import command


def main(argv):
    args = parsed(argv)
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    if args.mpi_defaults:
        from mpi4py import MPI  # noqa: F401  before rc.init(), whose settings come too late then

        args.buffers = ()
    found = command.measure_all(args, lambda: {name: PEERS[name]() for name in args.against})
    found["is_mpi_default"] = args.mpi_defaults
    is_first, code = rc.rank() == 0, command.finish(args, found)
    if args.plot is not None and is_first:
        from bench.plot import draw

        draw(found, args.plot)
    return code


def parsed(argv):
    parser = command.parser()
    parser.prog, parser.usage = "ci/bench collectives", None
    parser.add_argument(
        "--against",
        type=lambda text: () if text == "none" else command.names_of(tuple(PEERS))(text),
        default=("native",),
        metavar="NAME,...",
        help="native (default): MPI's own; gloo: torch.distributed's; torch: the same over "
        "ringcomm; or none",
    )
    parser.add_argument(
        "--mpi-defaults", action="store_true", help="MPI alone, with its own settings"
    )
    parser.add_argument("--plot", type=command.new_file, metavar="FILE.png", help="a picture, too")
    args = parser.parse_args(argv)
    if args.mpi_defaults and (args.against != ("native",) or args.mode != "sync"):
        parser.error("--mpi-defaults measures MPI alone: no --against and no --mode with it")
    return args
