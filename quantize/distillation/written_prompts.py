"""Prompts for the teacher, put together from topics and forms; written for this project."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from omnidraft_npu.prompts import TaskPrompt


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split("; "))


_TOPICS = _listed(
    "gardening; coffee; the ocean; electric cars; sleep; running; a birthday party; saving money; "
    "pasta; the moon; dogs; time management; the history of Rome; renewable energy; chess; "
    "photography; volcanoes; public speaking; recycling; bees; photosynthesis; jazz; baking bread; "
    "the water cycle; a lost wallet; moving to a new city; online privacy; dinosaurs; gravity; "
    "a late delivery; teamwork; climate change; football; bicycles; libraries; museums; vaccines; "
    "black holes; poetry; a noisy neighbour; house plants; camping; the human heart; trains; "
    "earthquakes; board games; friendship; robots; forests; mountains; headaches; a team meeting"
)
_CHAT = (
    "What is {}?",
    "Give me five tips about {}.",
    "Write a short poem about {}.",
    "Explain {} to a ten-year-old.",
    "Write a short e-mail about {} to a colleague.",
    "What speaks for and against {}?",
    "Tell me three interesting facts about {}.",
    "Make a list of questions to ask about {}.",
    "What are common mistakes with {}?",
    "Describe {} in one sentence.",
    "Rewrite this more formally: I think {} is really cool and you should check it out.",
    "Is the following sentence positive or negative? I was disappointed by {}.",
    "Write a dialogue between two friends about {}.",
)
_PLAIN = (
    "Write a short news article about {}.",
    "Write a paragraph about {}.",
    "Write a short story with names and places about {}.",
    "Write an encyclopedia entry about {}.",
)
_VERBS = _listed("count; find; remove; sort; print; collect; check; return")
_THINGS = _listed(
    "the vowels in a string; the even numbers in a list; duplicate words in a sentence; "
    "the digits of an integer; the prime numbers below n; the longest word of a text; "
    "the characters that occur more than once; common elements of two lists; "
    "the first n Fibonacci numbers; consecutive equal elements; balanced parentheses; "
    "the elements of a nested list; leap years in a range; anagrams in a list of words; "
    "the rows of a matrix; overlapping intervals; negative numbers in an array; "
    "palindromes in a list; tuples by their second item; missing numbers in a sequence"
)
_CODE = (
    "Write a Python function to {} {}.",
    "How can I {} {} in Python?",
    "Write a Python program that can {} {}, with an example.",
)
_NAMES = _listed("Anna; Ben; Chloe; David; Emma; Farid; Grace; Hugo; Ines; Jack")
_GOODS = _listed("apples; tickets; books; stickers; cups; pencils; flowers; cookies")
_MATHS = (
    "{0} has {2} {1} and buys {3} more. Then {0} gives away {4}. How many {1} are left?",
    "{0} sells {2} {1} a day at ${4} each. How much does {0} earn in {3} days?",
    "A box holds {2} {1}. {0} fills {4} boxes and has {3} {1} left over. How many {1} are there?",
    "{0} has {2} {1}, twice as many as a friend. How many {1} do they have together?",
    "{0} needs {2} minutes for each of {3} {1} and rests {4} minutes between two. How long is it?",
)
_EVENTS = _listed(
    "The city council closed the old bridge for repairs; A small bakery won a prize for its bread; "
    "The library lost part of its records in a flood; The school planted two hundred trees; "
    "The museum opened a new hall near the station; The team moved its match to Sunday; "
    "Researchers found a rare plant in the hills; The airline cancelled its morning flights"
)
_DETAILS = _listed(
    "after a long debate; because of heavy rain; thanks to a donation; although many objected"
)
_OUTCOMES = _listed(
    "The work will take about three months; Nobody was hurt; A final vote takes place on Tuesday; "
    "More than four hundred people came; Critics say that it came too late; "
    "Residents were surprised, but most welcomed the news"
)
_SUMMARISING = (
    "Summarize the following text in one sentence:\n\n{}",
    "Give me a short summary of this text: {}",
    "{}\n\nSummarize the text above.",
)


def written_prompts(seed: int) -> Iterator[TaskPrompt]:
    """A few thousand prompts for maths, code, chat, summarising and plain text, interleaved."""
    rng = np.random.default_rng(seed)
    families = {
        "maths": _maths(rng, 1000),
        "code": _crossed(_CODE, _VERBS, _THINGS),
        "chat": _crossed(_CHAT, _TOPICS),
        "summarising": _summarising(rng, 400),
        "plain": _crossed(_PLAIN, _TOPICS),
    }
    shuffled = [
        [TaskPrompt(task=task, prompt=prompts[i]) for i in rng.permutation(len(prompts))]
        for task, prompts in families.items()
    ]
    for row in zip_longest(*shuffled):
        yield from (prompt for prompt in row if prompt is not None)


def _crossed(forms: Sequence[str], *parts: Sequence[str]) -> list[str]:
    texts = list(forms)
    for part in parts:
        texts = [text.replace("{}", word, 1) for text in texts for word in part]
    return texts


def _maths(rng: np.random.Generator, count: int) -> list[str]:
    return [
        str(rng.choice(_MATHS)).format(
            rng.choice(_NAMES),
            rng.choice(_GOODS),
            int(rng.integers(6, 40)) * 2,
            int(rng.integers(3, 20)),
            int(rng.integers(2, 6)),
        )
        for _ in range(count)
    ]


def _summarising(rng: np.random.Generator, count: int) -> list[str]:
    texts = []
    for _ in range(count):
        first, second = rng.choice(_EVENTS, 2, replace=False)
        outcomes = ". ".join(rng.choice(_OUTCOMES, 2, replace=False))
        passage = f"{first} {rng.choice(_DETAILS)}. {outcomes}. {second}."
        texts.append(str(rng.choice(_SUMMARISING)).format(passage))
    return texts
