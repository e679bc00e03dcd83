"""Built-in environments: deterministic prompts, disjoint splits, and rewards judged by hand."""

import asyncio
import re

import pytest

from rlctl import config, plugins
from rlctl.envs import arithmetic, math, reasoning_gym, toy
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt


def play(environment, prompt, reply):
    """The reward of one reply."""

    async def episode():
        one = environment.start(prompt)
        assert not await one.step(Message(role="assistant", content=reply))
        return await one.reward()

    return asyncio.run(episode())


def test_the_environments_are_the_files_of_the_folder():
    assert plugins.names("environment") == ["arithmetic", "function", "math", "reasoning_gym", "toy"]


def make_arithmetic(**options):
    return arithmetic.Environment(arithmetic.Config(**options), config.Env(), config.Data())


def test_arithmetic_answers_are_right_and_echoing_the_question_earns_nothing():
    environment = make_arithmetic(operations=["add", "multiply"], size=300)
    for prompt in environment.dataset("train"):
        question = prompt.messages[0].content
        a, symbol, b = re.fullmatch(r"What is (\d) ([+*]) (\d)\?", question).groups()
        expected = int(a) + int(b) if symbol == "+" else int(a) * int(b)
        assert prompt.row["answer"] == str(expected)
        assert play(environment, prompt, f"It is {expected}.") == {"correct": 1.0}
        assert play(environment, prompt, question) == {"correct": 0.0}


def test_arithmetic_splits_are_disjoint_and_depend_on_the_seed_alone():
    train = [p.row["question"] for p in make_arithmetic(digits=1).dataset("train")]
    validation = [p.row["question"] for p in make_arithmetic(digits=1).dataset("validation")]
    assert not set(train) & set(validation)
    assert train == [p.row["question"] for p in make_arithmetic(digits=1).dataset("train")]
    assert train != [p.row["question"] for p in make_arithmetic(digits=1, seed=1).dataset("train")]


@pytest.mark.parametrize(
    ("text", "there"),
    [("= 7.", True), ("7", True), ("3+4=7, so", True), ("17", False), ("7.5", False), ("0.7", False), ("7,000", False)]
    + [("seven", False), ("", False), ("77", False), ("**7**", True)],
)
def test_a_number_counts_only_by_itself(text, there):
    assert arithmetic.contains_number(text, "7") is there


@pytest.mark.parametrize("options", [{"operations": ["divide"]}, {"operations": []}, {"digits": 9}, {"size": 0}])
def test_arithmetic_refuses_what_it_cannot_ask(options):
    with pytest.raises(RlctlError, match=r"env\.arithmetic"):
        make_arithmetic(**options)


def test_toy_rewards_the_share_of_wanted_characters():
    environment = toy.Environment(toy.Config(wanted="ab"), config.Env(), config.Data())
    prompt = environment.dataset("train")[3]
    assert play(environment, prompt, "abXX") == {"wanted": 0.5}
    assert play(environment, prompt, "") == {"wanted": 0.0}
    texts = {split: {p.messages[0].content for p in environment.dataset(split)} for split in ("train", "validation")}
    assert not texts["train"] & texts["validation"]


@pytest.mark.parametrize("module", [arithmetic, toy])
def test_environments_with_their_own_prompts_refuse_others(module):
    environment = module.Environment(module.Config(), config.Env(), config.Data())
    with pytest.raises(RlctlError, match=r"data\.train_path is set as well"):
        environment.check([])


def test_reasoning_gym_scores_by_the_tasks_own_scorer():
    options = reasoning_gym.Config(task="chain_sum", size=4, workers=1)
    environment = reasoning_gym.Environment(options, config.Env(), config.Data())
    train, validation = environment.dataset("train"), environment.dataset("validation")
    assert train == environment.dataset("train")
    assert train[0].row["question"] != validation[0].row["question"]
    answer = train[0].row["answer"]
    assert eval(train[0].row["metadata"]["expression"]) == int(answer)
    assert play(environment, train[0], f"<answer>1</answer> no: <answer> {answer} </answer>") == {"score": 1.0}
    assert play(environment, train[0], f"I say {answer}") == {"score": 0.0}


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({}, "task is not set", "e.g."),
        ({"task": "chain_sums"}, "no task `chain_sums`", "did you mean `chain_sum`?"),
        ({"task": "chain_sum", "kwargs": {"no_such": 1}}, "do not fit task `chain_sum`", "parameters"),
        ({"task": "chain_sum", "kwargs": {"min_terms": -1}}, "do not fit task `chain_sum`", "parameters"),
    ],
)
def test_reasoning_gym_refuses_a_wrong_task_at_start_up(options, message, hint):
    with pytest.raises(RlctlError) as caught:
        reasoning_gym.Environment(reasoning_gym.Config(**options), config.Env(), config.Data())
    assert message in caught.value.message
    assert hint in caught.value.hint


def row(index, answer):
    return Prompt(messages=(Message(role="user", content="?"),), row={"question": "?", "answer": answer}, index=index)


@pytest.fixture(scope="module")
def grader():
    data = config.Data(train_path="my.jsonl", output_key="answer")
    return math.Environment(math.Config(workers=1), config.Env(reward_timeout_seconds=20), data)


@pytest.mark.parametrize(
    ("gold", "reply", "reward"),
    [
        ("\\frac{1}{2}", "so it is $\\frac{2}{4}$", 1.0),
        ("0.5", "\\boxed{\\frac12}", 1.0),
        ("6", "The answer is 6.", 1.0),
        ("6", "The answer is 16.", 0.0),
        ("6", "I do not know", 0.0),
        ("x^2+1", "$1+x^2$", 1.0),
        ("(1,2)", "$[1,2]$", 0.0),
    ],
)
def test_math_grades_by_meaning(grader, gold, reply, reward):
    assert play(grader, row(0, gold), reply) == {"correct": reward}


def test_math_takes_gold_first(grader):
    """math-verify takes an interval for an inequality on the reply's side only, so swapped arguments would show."""
    assert play(grader, row(0, "1<x<2"), "$(1,2)$") == {"correct": 1.0}
    assert play(grader, row(0, "(1,2)"), "$1<x<2$") == {"correct": 0.0}


def test_gold_answers_that_can_be_graded_earn_full_reward_against_themselves(grader):
    grader.check([row(i, gold) for i, gold in enumerate(["6", "-2.5", "\\frac{1}{2}", "$\\pi$", "x^2+1", "1,234"])])


@pytest.mark.parametrize("gold", ["", "hello there", "She has five apples and buys three more so 5+3=8 apples"])
def test_gold_that_is_no_final_answer_is_refused_with_its_row(grader, gold):
    with pytest.raises(RlctlError, match="row 2: `answer`"):
        grader.check([row(0, "1"), row(1, gold)])


def test_math_needs_own_questions_and_answers():
    with pytest.raises(RlctlError, match="own questions"):
        math.Environment(math.Config(), config.Env(), config.Data(train_path="my.jsonl"))
