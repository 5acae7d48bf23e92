from __future__ import annotations

import pytest

from pageforge.cli import settings
from pageforge.cli.settings import SettingError, config_path, key, resolve, write


def write_file(text: str) -> None:
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(text, encoding="utf-8")


def test_built_in_defaults() -> None:
    found = resolve()
    assert (found.model, found.page_size, found.max_pages) == ("smollm2", 16, None)
    assert set(found.sources.values()) == {"default"}


def test_an_option_goes_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_file('page_size = 32\nmax_pages = 7\nmodel = "a"\n')
    monkeypatch.setenv("PAGEFORGE_PAGE_SIZE", "64")
    monkeypatch.setenv("PAGEFORGE_MODEL", "b")
    found = resolve({"page_size": 8, "max_new_tokens": 5}, model="c", max_memory=None)
    assert (found.max_new_tokens, found.max_pages, found.page_size) == (5, 7, 64)
    assert found.model == "c"
    assert found.sources["max_new_tokens"] == "default"
    assert found.sources["max_pages"].startswith("config file /")
    assert found.sources["page_size"] == "environment"
    assert found.sources["model"] == "option"
    assert found.sources["max_memory"] == "default"


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFORGE_PAGE_SIZE", "")
    assert resolve().page_size == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_size =", "not valid TOML"),
        ("page_size = 12", "page_size: expected one of 8, 16"),
        ("page_size = 16.5", "use digits only"),
        ("page_size = true", "use digits only"),
        ("max_pages = 0", "max_pages: expected at least 1, got 0"),
        ("pagesize = 16", "did you mean page_size?"),
        ("max-pages = 16", "did you mean max_pages?"),
        ("colour = 1", "take it out"),
        ("[model]\nname = 1", "model: expected a folder"),
        ("dtype = 'int8'", "dtype: expected one of auto, float32"),
        ("device = 'warp'", "device: expected auto"),
        ("max_memory = 0.5", "max_memory: expected bytes"),
    ],
)
def test_a_broken_file_is_named(text: str, message: str) -> None:
    write_file(text)
    with pytest.raises(SettingError) as caught:
        resolve()
    assert str(caught.value).startswith(f"{config_path()}: ")
    assert message in str(caught.value)


def test_a_file_that_is_not_text() -> None:
    write_file("")
    config_path().write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="not valid TOML"):
        resolve()


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFORGE_MAX_PAGES", "many")
    with pytest.raises(SettingError, match="variable PAGEFORGE_MAX_PAGES: max_pages: expected"):
        resolve()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("page_size", ["8", "256", 16], ["12", "4", "512", "-8", "0", "sixteen", "१६", ""]),
        ("max_pages", ["1", 10**6], ["0", "-1", "1.5", "1_000", True]),
        ("max_memory", ["4GiB", "50%", "1000", 1000], ["0", "much", "101%", "0.5", -1, True]),
        ("device", ["auto", "cpu", "cuda", "cuda:1"], ["warp", "cuda:x", ""]),
        ("dtype", ["auto", "float32", "bfloat16"], ["float64", "half", ""]),
        ("model", ["smollm2", "./a b", "org/name"], ["", " ", "a\nb", "a\x7f", 3]),
    ],
)
def test_values(name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        assert str(key(name).parse(value)) == str(value)
    for value in bad:
        with pytest.raises(SettingError, match=f"^{name}: expected"):
            key(name).parse(value)


@pytest.mark.parametrize("model", ["smollm2", 'quo"ted', "back\\slash", "häßlich 模型", "#x = [1]"])
def test_what_is_written_is_read_again(model: str) -> None:
    write("model", model)
    write("page_size", 32)
    assert (resolve().model, resolve().page_size) == (model, 32)
    write("model", None)
    assert (resolve().model, resolve().page_size) == ("smollm2", 32)


def test_comments_and_other_lines_stay() -> None:
    write_file("# mine\nmax_pages = 5  # few\npage_size = 8\n")
    write("page_size", 16)
    assert config_path().read_text() == "page_size = 16\n# mine\nmax_pages = 5  # few\n"


def test_a_wrong_value_can_be_set_right() -> None:
    write_file("page_size = 12\n")
    write("page_size", 16)
    assert resolve().page_size == 16


def test_what_cannot_be_changed_line_by_line_is_left_alone() -> None:
    text = 'model = """\npage_size = 8"""\n'
    write_file(text)
    with pytest.raises(SettingError, match="edit it"):
        write("page_size", 16)
    assert config_path().read_text() == text


def test_every_key_is_a_setting() -> None:
    assert set(settings.KEYS) == set(vars(resolve())) - {"sources"}
