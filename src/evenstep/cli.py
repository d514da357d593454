"""The command `evenstep`: reads the words, puts the parts together, and says in one line what is wrong."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep import __version__, world
from evenstep.errors import UserError
from evenstep.options import Parser, add_options

RUN = "a run's folder, its name, or the address where it is kept (see --to)"
ABOUT = "Train a PyTorch model on any number of processes, with the same result on each."


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; the exit code is 0, 1 for a failure, 2 for a mistake of the user's."""
    sys.exit(_guarded(sys.argv[1:] if words is None else words))


def _guarded(words: Sequence[str]) -> int:
    from evenstep.launch.blame import RankFailed
    from evenstep.watch.stopping import Stopped

    try:
        _as_rank(words) if world.from_launcher() is not None else _run(words)
        sys.stdout.flush()
    except UserError as error:
        return _say(" ".join(str(error).splitlines()), 2)
    except RankFailed as error:
        sys.stderr.write(error.culprit.trace)
        return _say(str(error), 1)
    except Stopped as error:
        return _say(error.why, error.code) if error.why else error.code
    except KeyboardInterrupt:
        return _say("stopped by SIGINT", 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output has left: nothing to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor for Python to flush at its end
        return 128 + signal.SIGPIPE
    return 0


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"evenstep: {text}\n")
    return code


def _as_rank(words: Sequence[str]) -> None:
    """Run under torchrun, whose summary names the first error only if it is told."""
    from torch.distributed.elastic.multiprocessing.errors import record

    mistakes: list[UserError] = []

    def run() -> None:
        try:
            _run(words)
        except UserError as error:
            mistakes.append(error)

    record(run)()
    if mistakes:
        raise mistakes[0]


def _run(words: Sequence[str]) -> None:
    found = vars(make_parser().parse_args(words))
    found.pop("act")(**found)


def make_parser() -> Parser:
    """All commands and their options."""
    from evenstep.config import CHOICES, Config

    parser = Parser(prog="evenstep", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"evenstep {__version__}")
    parser.set_defaults(act=parser.print_help)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = _command(commands, "train", _train, "train a model; the run gets a folder of its own")
    add_options(train, Config, CHOICES, positional="task")
    train.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of options; those given here win")

    resume = _command(commands, "resume", _resume, "go on with a run that was stopped or killed")
    resume.add_argument("run", metavar="RUN", help=f"{RUN}; from an address it goes on here")
    resume.add_argument("--procs", type=int, default=argparse.SUPPRESS, metavar="N", help="processes")
    resume.add_argument(
        "--nodes", default=argparse.SUPPRESS, metavar="N", help="machines, or from how many to how many: 1:4"
    )
    resume.add_argument("--strategy", default=argparse.SUPPRESS, metavar="NAME", help="one, dp, ddp or fsdp")
    resume.add_argument("--device", default=argparse.SUPPRESS, metavar="NAME", help="auto, cpu, cuda or mps")
    resume.add_argument("--data", default=argparse.SUPPRESS, metavar="DIR", help="the folder of data sets")
    resume.add_argument(
        "--max-restarts",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="times that all ranks are started again",
    )
    resume.add_argument("--to", default=argparse.SUPPRESS, metavar="ADDRESS", help="keep the run there as well")
    resume.add_argument(
        "--on-nan",
        default=argparse.SUPPRESS,
        metavar="{stop,skip}",
        help="where a loss is not finite: stop, or skip that step",
    )
    resume.add_argument(
        "--allow-drift",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on with other code, data or model than the run began with",
    )
    resume.add_argument("--runs", default="runs", metavar="DIR", help="the folder of runs")

    audit = _command(commands, "audit", _audit, "prove from a run's records that no sample was lost or repeated")
    audit.add_argument("run", metavar="RUN", help=RUN)
    audit.add_argument("--runs", default="runs", metavar="DIR", help="the folder of runs")

    export = _command(commands, "export", _export, "write a run's weights to a file of their own")
    export.add_argument("run", metavar="RUN", help=RUN)
    export.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="model.safetensors, for safetensors.torch.load_file, or model.pt, for torch.load",
    )
    export.add_argument("--weights", default="best", metavar="NAME", help="best (the default) or last")
    export.add_argument("--runs", default="runs", metavar="DIR", help="the folder of runs")

    evaluate = _command(commands, "evaluate", _evaluate, "measure a run's weights on its task's data")
    evaluate.add_argument("run", metavar="RUN", help=RUN)
    evaluate.add_argument(
        "--split", default="test", metavar="NAME", help="train, validation or test (the default)"
    )
    evaluate.add_argument("--weights", default="best", metavar="NAME", help="best (the default) or last")
    evaluate.add_argument("--procs", type=int, default=argparse.SUPPRESS, metavar="N", help="processes")
    evaluate.add_argument("--device", default=argparse.SUPPRESS, metavar="NAME", help="auto, cpu, cuda or mps")
    evaluate.add_argument("--data", default=argparse.SUPPRESS, metavar="DIR", help="the folder of data sets")
    evaluate.add_argument("--runs", default="runs", metavar="DIR", help="the folder of runs")

    data = _command(commands, "data", None, "the data sets of the tasks that come with evenstep")
    actions = data.add_subparsers(title="commands", metavar="COMMAND")
    listing = _command(actions, "list", _data_list, "what there is, and where")
    get = _command(actions, "get", _data_get, "download one from its publisher")
    get.add_argument("name", metavar="NAME", help="the data set's name, as `evenstep data list` has it")
    for command in (listing, get):
        command.add_argument(
            "--data", type=Path, metavar="DIR", help="the folder of data sets (default: EVENSTEP_DATA, or ./data)"
        )
    return parser


def _command(commands: Any, name: str, act: Any, about: str) -> Parser:
    parser: Parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.set_defaults(act=act or parser.print_help)
    return parser


# What the commands do; what they need is imported here, so that help comes at once


def _train(config: Path | None = None, **options: Any) -> None:
    from evenstep.config import Config, read_yaml
    from evenstep.tasks.catalog import BUILT_IN
    from evenstep.watch import stopping

    given = read_yaml(config) if config is not None else {}
    given = {**given, **options, "set": {**given.get("set", {}), **options.get("set", {})}}
    if "task" not in given:
        raise UserError(f"train what? there are {', '.join(BUILT_IN)}, or a file of yours ending in .py")
    settings = Config(**given)
    with stopping.resumable():
        _start_early(settings.procs)
        from evenstep import api

        api.train_config(settings, [Path(sys.argv[0]).name, *sys.argv[1:]])


def _resume(run: str, runs: str, **options: Any) -> None:
    from evenstep.watch import stopping

    with stopping.resumable():
        _start_early(options.get("procs", 1))
        from evenstep import api

        api.resume(run, runs=runs, **options)


def _audit(run: str, runs: str) -> None:
    from evenstep.records.audit import audit
    from evenstep.records.screen import audited
    from evenstep.snapshots.abroad import located

    with located(run, Path(runs), "events") as files:
        found = audit(files)
    audited(found)
    if not found.sound:
        sys.exit(1)


def _export(run: str, file: Path, weights: str, runs: str) -> None:
    from evenstep import api
    from evenstep.records.screen import say

    api.export(run, file, weights=weights, runs=runs)
    say(f"{weights} weights of {run} are in {file}")


def _evaluate(run: str, split: str, weights: str, runs: str, **options: Any) -> None:
    _start_early(options.get("procs", 1))
    from evenstep import api
    from evenstep.records.screen import table

    values = api.evaluate(run, split=split, weights=weights, runs=runs, **options)
    table(values)


def _start_early(procs: int) -> None:
    """Loading torch takes a second: let the processes to come do so while this one does."""
    if procs > 1 and world.from_launcher() is None:
        from evenstep.launch import local

        local.preload()


def _data_list(data: Path | None) -> None:
    from evenstep.records.screen import say
    from evenstep.tasks.sources import listing

    for found in listing(data or world.data_home()):
        where = f"here: {found.path}" if found.here else f"not here: {found.source.size / 1e6:,.0f} MB from "
        say(f"{found.name:<10} {where}{'' if found.here else found.source.address}")


def _data_get(name: str, data: Path | None) -> None:
    from evenstep.records.screen import downloading, say
    from evenstep.tasks.sources import SOURCES, get

    with downloading(name) as report:
        path = get(name, data or world.data_home(), report)
    say(f"{name} is in {path}; its terms: {SOURCES[name].terms}")
