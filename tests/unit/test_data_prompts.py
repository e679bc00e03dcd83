"""Own prompts: what is read, what is refused and where, and which prompts a step takes."""

import json

import pytest

from rlctl import config
from rlctl.data import prompts
from rlctl.errors import RlctlError


def data(path, **fields):
    return config.Data(train_path=str(path), **fields)


def jsonl(folder, *rows):
    path = folder / "my.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def test_a_text_is_a_user_message_and_messages_stay_as_they_are(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    loaded = prompts.load(data(jsonl(tmp_path, {"question": "3+4?", "extra": 1}, "", {"question": chat})))
    assert [[(m.role, m.content) for m in p.messages] for p in loaded] == [
        [("user", "3+4?")],
        [("system", "s"), ("user", "u")],
    ]
    assert [p.index for p in loaded] == [0, 1]
    assert loaded[0].row == {"question": "3+4?", "extra": 1}


def test_parquet_reads_like_jsonl(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "my.parquet")
    from_parquet = prompts.load(data(tmp_path / "my.parquet", output_key="answer"))
    assert from_parquet == prompts.load(data(jsonl(tmp_path, *rows), output_key="answer"))


@pytest.mark.parametrize(
    ("rows", "fields", "message", "hint"),
    [
        (['{"question": 1'], {}, "my.jsonl:1: not JSON", "one JSON object a line"),
        (['{"question": "a"}', "[1]"], {}, "my.jsonl:2: a list", "one JSON object a line"),
        (['{"qestion": "a"}'], {}, "no column `question`", "did you mean `qestion`?"),
        (['{"question": "a"}'], {"output_key": "answer"}, "no column `answer` (data.output_key)", "columns: question"),
        (['{"question": ""}'], {}, "no prompt", "not empty"),
        (['{"question": [{"role": "user"}]}'], {}, "no prompt", "{role, content}"),
        (['{"question": [{"role": "assistant", "content": "x"}]}'], {}, "assistant", "end the prompt"),
        ([""], {}, "has no rows", "at least one row"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused_with_its_line(tmp_path, rows, fields, message, hint):
    with pytest.raises(RlctlError) as caught:
        prompts.load(data(jsonl(tmp_path, *rows), **fields))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(("name", "message"), [("absent.jsonl", "no file"), ("my.csv", "neither JSONL nor parquet")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, message):
    with pytest.raises(RlctlError, match=message):
        prompts.load(data(tmp_path / name))


def test_a_broken_parquet_file_is_refused(tmp_path):
    (tmp_path / "my.parquet").write_bytes(b"not parquet")
    with pytest.raises(RlctlError, match="not a readable parquet file"):
        prompts.load(data(tmp_path / "my.parquet"))


def test_long_prompts_are_dropped_and_counted_and_keep_their_index(tmp_path):
    loaded = prompts.load(data(jsonl(tmp_path, *({"question": "x" * n} for n in (5, 9, 2)))))
    kept, dropped = prompts.drop_long(loaded, limit=5, length=lambda p: len(p.messages[0].content))
    assert ([p.index for p in kept], dropped) == ([0, 2], 1)
    with pytest.raises(RlctlError, match=r"all 3 prompts are longer than 1 tokens \(the shortest has 2\)"):
        prompts.drop_long(loaded, limit=1, length=lambda p: len(p.messages[0].content))


def test_the_system_prompt_comes_first_unless_the_row_has_its_own(tmp_path):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}]
    loaded = prompts.with_system_prompt(
        prompts.load(data(jsonl(tmp_path, {"question": "q"}, {"question": own}))), "ours"
    )
    assert [p.messages[0].content for p in loaded] == ["ours", "own"]


def order(**fields):
    return prompts.PromptOrder(**({"n": 5, "per_step": 2, "seed": 1} | fields))


def test_every_epoch_takes_every_prompt_once_in_its_own_order():
    taken = [i for step in range(1, 11) for i in order().at(step)]
    epochs = [taken[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(e) for e in epochs}) > 1


def test_order_depends_on_seed_and_step_alone():
    assert order().at(7) == order().at(7)
    assert [order(seed=1).at(s) for s in range(1, 6)] != [order(seed=2).at(s) for s in range(1, 6)]


def test_unshuffled_order_wraps_inside_a_step_even_when_a_step_is_larger_than_the_data():
    assert [order(shuffle=False).at(s) for s in (1, 2, 3)] == [[0, 1], [2, 3], [4, 0]]
    assert order(shuffle=False, n=2, per_step=5).at(1) == [0, 1, 0, 1, 0]
    assert order(n=5, per_step=2).position(4) == (1, 1)


def test_epochs_end_once_every_prompt_was_taken():
    assert (order().num_steps(1), order().num_steps(2), order(n=2, per_step=5).num_steps(1)) == (3, 5, 1)
