"""The command `evenstep`: reads the words, puts the parts together, and says in one line what is wrong."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep import __version__, world
from evenstep.errors import UserError
from evenstep.options import Parser, add_options

if TYPE_CHECKING:
    from evenstep.service.client import Client

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

    audit = _command(commands, "audit", _audit, "prove from the records that no sample was lost or repeated")
    audit.add_argument("run", metavar="RUN", help=f"{RUN}; or the folder of an order service")
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

    _add_service(commands)

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


def _add_service(commands: Any) -> None:
    """The commands of the order service."""
    from evenstep.order.plan import DEALS, POLICIES
    from evenstep.service.spec import Spec

    serve = _command(commands, "serve", _serve, "hand out orders of data sets to any number of readers, by gRPC")
    serve.add_argument(
        "--data", type=Path, metavar="DIR", help="the folder of its ledger; nothing is written elsewhere"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", metavar="NAME", help="the address to serve (default: this machine)"
    )
    serve.add_argument(
        "--port", type=int, default=7077, metavar="N", help="7077, unless given; 0 for any that is free"
    )
    serve.add_argument("--metrics-port", type=int, metavar="N", help="serve /metrics there, for Prometheus")
    serve.add_argument(
        "--token-file", type=Path, metavar="FILE", help="let in only who has the token in this file"
    )
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="encrypt, with this certificate (PEM)")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's private key (PEM)")
    serve.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="with --status: the certificates to trust (PEM)"
    )
    serve.add_argument(
        "--status", action="store_true", help="say how the server at --host and --port stands, and end"
    )

    session = _command(commands, "session", None, "sessions of an order service: passes over a data set")
    actions = session.add_subparsers(title="commands", metavar="COMMAND")
    opening = _command(actions, "open", _session_open, "open a session; one that is there with this plan is found")
    opening.add_argument("--name", required=True, metavar="NAME", help="its name")
    add_options(opening, Spec, {"policy": tuple(POLICIES), "deal": tuple(DEALS)})
    listing = _command(actions, "list", _session_list, "all sessions, and where they stand")
    show = _command(actions, "show", _session_show, "one session, with its workers")
    close = _command(actions, "close", _session_close, "let a session hand out nothing more")
    close.add_argument("--forget", action="store_true", help="remove its ledger too; its name is free again")
    for command in (show, close):
        command.add_argument("name", metavar="NAME", help="its name")
    for command in (opening, listing, show, close):
        command.add_argument(
            "--server", default="127.0.0.1:7077", metavar="HOST:PORT", help="where evenstep serve is"
        )
        command.add_argument("--token-file", type=Path, metavar="FILE", help="a file with the server's token")
        command.add_argument(
            "--tls-ca", type=Path, metavar="FILE", help="the certificates to trust (PEM), for TLS"
        )


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
    from evenstep.service.audit import is_ledger

    if is_ledger(Path(run)):
        _audit_ledger(Path(run))
        return
    from evenstep.records.audit import audit
    from evenstep.records.screen import audited
    from evenstep.snapshots.abroad import located

    with located(run, Path(runs), "events") as files:
        found = audit(files)
    audited(found)
    if not found.sound:
        sys.exit(1)


def _audit_ledger(folder: Path) -> None:
    from evenstep.service import shown
    from evenstep.service.audit import audit

    epochs = audit(folder)
    shown.audited(epochs)
    if not all(epoch.sound for epoch in epochs):
        sys.exit(1)


def _serve(status: bool, data: Path | None, tls_ca: Path | None, **options: Any) -> None:
    with _service_extra():
        from evenstep.service import shown
        from evenstep.service.client import Client
        from evenstep.service.server import Serving, serve
    if status:
        where = f"{options['host']}:{options['port']}"
        with Client(where, token_file=options["token_file"], tls_ca=tls_ca) as client:
            shown.sessions(client.list())
        return
    if data is None:
        raise UserError(
            "serve from what? --data DIR names the folder of the ledger; it is made if it is not there"
        )
    serve(Serving(data=data, **options), shown.say)


def _session_open(name: str, server: str, token_file: Path | None, tls_ca: Path | None, **options: Any) -> None:
    from evenstep.service import shown
    from evenstep.service.spec import Spec

    if "size" not in options:
        raise UserError("a session is of how many samples? --size N says it")
    if options.get("policy") in ("shards", "blocks"):
        options.setdefault("dealt_to", options.get("world") or 1)
    with _client(server, token_file, tls_ca) as client:
        shown.session(client.open(name, Spec(**options)))


def _session_list(server: str, token_file: Path | None, tls_ca: Path | None) -> None:
    from evenstep.service import shown

    with _client(server, token_file, tls_ca) as client:
        shown.sessions(client.list())


def _session_show(name: str, server: str, token_file: Path | None, tls_ca: Path | None) -> None:
    from evenstep.service import shown

    with _client(server, token_file, tls_ca) as client:
        shown.session(client.show(name))


def _session_close(name: str, forget: bool, server: str, token_file: Path | None, tls_ca: Path | None) -> None:
    from evenstep.service import shown

    with _client(server, token_file, tls_ca) as client:
        client.close_session(name, forget=forget)
    shown.say(f"session {name} is {'forgotten' if forget else 'closed'}")


def _client(server: str, token_file: Path | None, tls_ca: Path | None) -> "Client":
    with _service_extra():
        from evenstep.service.client import Client
    return Client(server, token_file=token_file, tls_ca=tls_ca)


@contextlib.contextmanager
def _service_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"the order service needs {error.name}: pip install 'evenstep[service]'") from None


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
