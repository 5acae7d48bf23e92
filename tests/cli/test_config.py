from __future__ import annotations

import json

from tests.cli.conftest import said

from pageforge.cli.settings import config_path


def test_set_show_unset(invoke, monkeypatch) -> None:
    done = invoke("config", "set", "page_size", "32")
    assert done.exit_code == 0
    assert str(config_path()) in done.stdout
    monkeypatch.setenv("PAGEFORGE_DTYPE", "float16")
    shown = json.loads(invoke("config", "show", "--json").stdout)
    assert shown["path"] == str(config_path())
    assert shown["settings"]["page_size"]["value"] == 32
    assert shown["settings"]["page_size"]["source"] == f"config file {config_path()}"
    assert shown["settings"]["dtype"] == {"value": "float16", "source": "environment"}
    assert shown["settings"]["max_pages"] == {"value": None, "source": "default"}
    table = invoke("config", "show").stdout
    assert "PAGEFORGE_DTYPE" in table
    assert "config file" in table
    assert invoke("config", "unset", "page_size").exit_code == 0
    assert json.loads(invoke("config", "show", "--json").stdout)["settings"]["page_size"] == {
        "value": 16,
        "source": "default",
    }


def test_path_is_a_line_to_use(invoke) -> None:
    assert invoke("config", "path").stdout == f"{config_path()}\n"


def test_wrong_input_is_a_usage_error_and_writes_nothing(invoke) -> None:
    for arguments in (("pagesize", "16"), ("page_size", "12"), ("page_size",), ("model", "")):
        done = invoke("config", "set", *arguments)
        assert done.exit_code == 2
        assert done.stdout == ""
    assert "did you mean page_size?" in said(invoke("config", "unset", "pagesize").stderr)
    assert not config_path().exists()


def test_a_variable_that_hides_the_new_value_is_mentioned(invoke, monkeypatch) -> None:
    monkeypatch.setenv("PAGEFORGE_PAGE_SIZE", "64")
    assert "PAGEFORGE_PAGE_SIZE is set" in invoke("config", "set", "page_size", "32").stdout


def test_a_folder_that_cannot_be_made(invoke) -> None:
    config_path().parent.parent.mkdir(parents=True, exist_ok=True)
    config_path().parent.write_text("a file, where the folder should be")
    done = invoke("config", "set", "page_size", "32")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
