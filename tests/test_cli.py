import subprocess
import sys
import types

import pytest

from rollout_spec import __version__, cli
from rollout_spec.config import ConfigError


@pytest.fixture
def command(monkeypatch):
    """The only subcommand is `try`; the test sets what it does."""
    module = types.ModuleType("fake_command")
    module.handler = lambda args: None

    def add_parser(subparsers):
        parser = subparsers.add_parser("try")
        parser.add_argument("--size", type=int)
        parser.set_defaults(handler=lambda args: module.handler(args))

    module.add_parser = add_parser
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setattr(cli, "COMMANDS", ("fake_command",))
    return module


def raises(error):
    def handler(args):
        raise error

    return handler


def test_the_exit_code_is_the_handlers(command):
    assert cli.main(["try"]) == 0
    command.handler = lambda args: args.size
    assert cli.main(["try", "--size", "3"]) == 3


def test_bad_input_is_one_line_and_exit_code_2(command, capsys):
    command.handler = raises(ConfigError("drafter.k_max: value 0: must be at least 1"))
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "rollout-spec: error: drafter.k_max: value 0: must be at least 1\n"


def test_ctrl_c_is_exit_code_130(command):
    command.handler = raises(KeyboardInterrupt())
    assert cli.main(["try"]) == 130


def test_a_fault_of_ours_keeps_its_traceback(command):
    command.handler = raises(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["try"])


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["try", "--size", "x"]])
def test_bad_usage_is_exit_code_2(command, argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: rollout-spec" in capsys.readouterr().err


def test_version(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"rollout-spec {__version__}\n"


@pytest.fixture
def only_model(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "COMMANDS", ("rollout_spec.model",))
    monkeypatch.setenv("ROLLOUT_SPEC_HOME", str(tmp_path))


@pytest.mark.parametrize("action", ["path", "verify"])
def test_an_unfetched_model_is_bad_input(only_model, action, capsys):
    assert cli.main(["model", action]) == 2
    assert "run `rollout-spec model fetch smollm2-135m`" in capsys.readouterr().err


def test_an_unknown_model_is_bad_input(only_model, capsys):
    assert cli.main(["model", "fetch", "gpt-2"]) == 2
    assert capsys.readouterr().err.startswith("rollout-spec: error: model 'gpt-2': not a model")


def test_the_help_of_every_command_needs_no_engine():
    heavy = "{'torch', 'transformers', 'vllm', 'ray', 'verl'}"
    code = f"from rollout_spec import cli; import sys; cli.build_parser(); print({heavy} & set(sys.modules) or 'light')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "light"
