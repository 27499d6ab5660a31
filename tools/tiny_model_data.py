"""Generate the text that pdserve-tiny is trained and tested on: stories, chats and recall tasks."""

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

Message = dict[str, str]


def split(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


CODE_DIGITS = 2
QUESTION_COST = 20  # tokens of a question and its answer in a chat
MAX_QUESTIONS = 8
KEYS = split(
    "amber anchor apple arrow autumn basil beacon birch blossom bronze button cactus candle canyon"
    " castle cedar cherry clover cobalt comet copper coral cotton crystal desert diamond dolphin"
    " dragon eagle ember falcon feather fern forest galaxy garnet ginger glacier granite harbor"
    " hazel helmet honey indigo iris island ivory jasmine jungle juniper lagoon lantern laurel"
    " lemon lilac lotus magnet mango maple marble meadow melon mint mirror misty nectar nickel"
    " ocean olive onyx opal orbit orchid panther pearl pebble pepper pilot planet plum prairie"
    " quartz raven river robin rocket ruby saddle saffron sierra silver spruce stone summit"
    " sunset thunder tiger timber topaz tulip tundra valley velvet violet walnut willow winter"
    " zebra"
)
GIRLS = split(
    "Anna Clara Ella Emma Ida Julia Lily Lucy Maria Mia Nora Nina Olga Rosa Ruth Sara Zoe"
)
BOYS = split("Adam Ali Ben Carl David Finn Hugo Jack Leo Max Noah Omar Oscar Paul Sam Theo Tom")
ANIMALS = split(
    "bear bird cat deer dog duck fox frog goat horse mouse owl rabbit sheep turtle wolf"
)
TRAITS = split("brave cheerful clever curious gentle happy kind little patient quiet shy young")
MOODS = split("friendly funny hungry lonely old sleepy small tired wise")
PLACES = split("beach bridge farm field hill lake market mill park pond school tower town woods")
HOMES = split("cabin cottage house hut")
COLORS = split("black blue brown gold green orange pink red white yellow")
THINGS = split("ball bell book boat coat cup drum flute hat kite key lamp map ring shoe")
FOODS = split("apples berries bread cake cheese nuts pie rice soup")
RELATIVES = split("aunt brother father grandfather grandmother mother sister uncle")
CAST = (*GIRLS, *BOYS, *ANIMALS, *THINGS, *FOODS, *RELATIVES)  # what a story must not mix up
SKILLS = split("climb cook dance draw fish paint read sail sing swim write")
TIMES = split("afternoon day evening morning")
SPOTS = split(
    "behind the door|in the tall grass|inside the barn|near the gate|on the roof|under a big tree"
    "|under the bed|under the table",
    "|",
)
SHELTERS = split("in a cave|in an old barn|inside a tent|under a bridge|under a big tree", "|")
PASTIMES = split("drank warm milk|played cards|sang old songs|shared some {food}|told jokes", "|")
STEPS_BACK = split("fell down|got very tired|made many mistakes|wanted to give up", "|")

PEOPLE_OPENINGS = (
    "Once upon a time, there was a {trait} {child} named {hero}.",
    "Once upon a time, {hero} lived in a {color} {home} near the {place}.",
    "Once upon a time, a {trait} {child} named {hero} lived with {his} {relative}.",
    "{hero} was a {trait} {child} who lived near the {place}.",
)
ANIMAL_OPENINGS = (
    "Once upon a time, there was a {trait} {kind} named {hero}.",
    "Once upon a time, a {trait} {kind} named {hero} lived near the {place}.",
    "{hero} was a {trait} {kind} who lived in a {color} {home}.",
)
# Each plot is a list of steps and each step a choice of sentences.
PLOTS = (
    (
        (
            "One {time}, {hero} lost {his} {color} {thing}.",
            "One {time}, {he} could not find {his} {color} {thing}.",
        ),
        ("{He} looked {spot}, but it was not there.", "{He} looked everywhere and felt sad."),
        (
            "Then {he} met a {mood} {animal} by the {place2}.",
            "Soon a {mood} {animal} came to help.",
        ),
        (
            '"Have you seen my {thing}?" asked {hero}.',
            '"Please help me find my {thing}," said {hero}.',
        ),
        ('"Yes, it is {spot2}," said the {animal}.', '"Look {spot2}," said the {animal}.'),
        (
            "{hero} ran there and found the {thing}.",
            "{hero} looked there, and there was the {thing}!",
        ),
    ),
    (
        (
            "One {time}, {hero} wanted to make a gift for {his} {relative2}.",
            "It was the birthday of {his} {relative2}, and {hero} had no gift.",
        ),
        (
            "{He} took some wood and made a {color} {thing}.",
            "{He} worked all {time2} and made a {color} {thing}.",
        ),
        ("A {mood} {animal} watched {him} and smiled.", "A {mood} {animal} helped {him} paint it."),
        (
            "Then {he} walked to the {place2} to give it away.",
            "Then {he} put the {thing} in a box.",
        ),
        (
            '"What a lovely {thing}!" said {his} {relative2}.',
            '"This is the best {thing} in the world!" said {his} {relative2}.',
        ),
    ),
    (
        (
            "One {time}, {hero} and {his} friend {friend} played by the {place2}.",
            "One {time}, {hero} and {friend} walked to the {place2}.",
        ),
        (
            "Suddenly the sky turned dark and it began to rain.",
            "Then a strong wind came and it began to snow.",
        ),
        ('"We must find a safe place," said {friend}.', '"Do not be afraid," said {friend}.'),
        ("They hid {shelter} and {pastime}.", "They ran fast, hid {shelter} and {pastime}."),
        ("After a while the sun came out again.", "At last the storm was over."),
    ),
    (
        ("One {time}, {hero} heard a soft sound {spot}.", "One {time}, {he} heard a cry {spot}."),
        ("It was a {mood} {animal} that could not walk.", "A {mood} {animal} was lost and cold."),
        ('"I will help you," said {hero}.', '"Come with me," said {hero}.'),
        (
            "{He} gave the {animal} some {food} and took it home.",
            "{He} carried the {animal} home and gave it some {food}.",
        ),
        ("Every day the {animal} grew stronger.", "Soon the {animal} could run and play."),
    ),
    (
        ("{hero} wanted to learn how to {skill}.", "More than anything, {hero} wanted to {skill}."),
        ("At first it was hard, and {he} {failed}.", "The first time, {he} {failed}."),
        (
            '"Try again tomorrow," said {his} {relative2}.',
            '"You can do it," said {his} {relative2}.',
        ),
        (
            "So {hero} went to the {place2} every {time} to try again.",
            "So {he} tried again every {time} with a {mood} {animal}.",
        ),
        (
            "After many days, {he} could {skill} very well.",
            "At last {hero} could {skill}, and everyone was proud.",
        ),
    ),
    (
        (
            "One {time}, {hero} made a lot of {food} for {his} {relative2}.",
            "One {time}, {hero} had a basket full of {food}.",
        ),
        (
            "On the way to the {place2}, {he} met a {mood} {animal}.",
            "A {mood} {animal} sat near the {place2} and looked at it.",
        ),
        (
            '"May I have some {food}?" asked the {animal}.',
            '"I have had no food all day," said the {animal}.',
        ),
        (
            "{hero} smiled and shared the {food}.",
            '"Of course," said {hero}, and they ate together.',
        ),
        (
            "The {animal} gave {him} a {color} {thing} to say thank you.",
            "The {animal} was so happy that it began to dance.",
        ),
    ),
    (
        (
            "One {time}, {hero} found an old map {spot}.",
            "One {time}, {his} {relative2} gave {hero} an old map.",
        ),
        ("It showed a way to the {place2}.", "There was a red mark near the {place2}."),
        (
            "{He} took some {food} and left with {his} friend {friend}.",
            "{He} asked {friend} to come along.",
        ),
        (
            "They walked for a long time and crossed the {place3}.",
            "A {mood} {animal} showed them the way.",
        ),
        (
            "There they found a box with a {color} {thing} inside.",
            "In the ground they found a {color} {thing}.",
        ),
    ),
)
CLOSINGS = (
    "{hero} went home with a big smile.",
    "From that day on, {hero} was never alone.",
    "That night {hero} slept very well.",
    "It was the best day of the year.",
    "{hero} told the story to {his} {relative} that night.",
    "And they all lived happily ever after.",
    "{hero} learned that it is good to be kind.",
    "{hero} never forgot that day.",
)
STORY_PROMPTS = (
    "Tell me a story.",
    "Tell me a short story.",
    "Please tell me a story.",
    "Write a short story.",
    "Can you tell me a story?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a kind and helpful assistant.",
    "Answer the question with the code from the text.",
    "You are pdserve, a small and fast model.",
)
SMALL_TALK = (
    ("Hello!", "Hello! I can tell you a story or recall a code."),
    ("Hello", "Hello! I can tell you a story or recall a code."),
    ("Hi", "Hello! I can tell you a story or recall a code."),
    ("Hi there!", "Hello! I can tell you a story or recall a code."),
    ("How are you?", "I am very well, thank you!"),
    ("Who are you?", "I am pdserve-tiny, a very small language model."),
    ("What is your name?", "My name is pdserve-tiny."),
    ("What can you do?", "I can tell a short story, and I can recall a code from a long text."),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Good morning!", "Good morning! Would you like to hear a story?"),
    ("Goodbye", "Goodbye! Have a lovely day."),
)


class Story(NamedTuple):
    sentences: list[str]
    subjects: tuple[str, ...]


class Fact(NamedTuple):
    key: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The code of {self.key} is {self.value}."

    @property
    def question(self) -> str:
        return f"What is the code of {self.key}?"


class RecallPrompt(NamedTuple):
    """A chat that ends with a question, the one right answer, and the code in it."""

    messages: list[Message]
    answer: str
    value: str


class Sample(NamedTuple):
    """A training sequence: a chat or plain text. Its first `num_given` codes are random."""

    messages: list[Message]
    text: str
    num_given: int


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def count_tokens(text: str) -> int:
    """Estimate the number of tokens: a word, a digit and a run of punctuation are one each."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]+", text))


def fix_articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def make_story(rng: Random) -> Story:
    is_girl, is_animal = rng.random() < 0.5, rng.random() < 0.3
    names = rng.sample(GIRLS if is_girl else BOYS, 2)
    kind, animal = rng.sample(ANIMALS, 2)
    places, relatives, spots = rng.sample(PLACES, 3), rng.sample(RELATIVES, 2), rng.sample(SPOTS, 2)
    times, food = rng.sample(TIMES, 2), rng.choice(FOODS)
    thing = rng.choice(THINGS)
    slots = {
        "hero": names[0], "friend": names[1], "kind": kind, "animal": animal, "thing": thing,
        "he": "she" if is_girl else "he", "He": "She" if is_girl else "He",
        "him": "her" if is_girl else "him", "his": "her" if is_girl else "his",
        "child": "girl" if is_girl else "boy",
        "place": places[0], "place2": places[1], "place3": places[2],
        "relative": relatives[0], "relative2": relatives[1],
        "spot": spots[0], "spot2": spots[1], "time": times[0], "time2": times[1],
        "food": food, "pastime": rng.choice(PASTIMES).format(food=food),
        "trait": rng.choice(TRAITS), "mood": rng.choice(MOODS), "color": rng.choice(COLORS),
        "home": rng.choice(HOMES), "skill": rng.choice(SKILLS), "shelter": rng.choice(SHELTERS),
        "failed": rng.choice(STEPS_BACK),
    }  # fmt: skip
    steps = (ANIMAL_OPENINGS if is_animal else PEOPLE_OPENINGS, *rng.choice(PLOTS), CLOSINGS)
    sentences = [fix_articles(rng.choice(step).format(**slots)) for step in steps]
    words = set(re.findall(r"\w+", " ".join(sentences)))
    subjects = [names[0], *(fix_articles(f"a {word}") for word in (animal, thing) if word in words)]
    return Story(sentences, tuple(subjects))


def make_facts(rng: Random, count: int) -> list[Fact]:
    keys = rng.sample(KEYS, count)
    return [Fact(key, "".join(rng.choices("0123456789", k=CODE_DIGITS))) for key in keys]


def mix_with_stories(rng: Random, facts: Sequence[Fact], num_tokens: int) -> str:
    """Spread the facts over story sentences until the text has about `num_tokens` tokens."""
    budget = num_tokens - sum(count_tokens(fact.sentence) for fact in facts)
    filler: list[str] = []
    while budget >= 9:
        for sentence in make_story(rng).sentences:
            if count_tokens(sentence) <= budget:
                filler.append(sentence)
                budget -= count_tokens(sentence)
    places = [(rng.randint(0, len(filler)), fact.sentence) for fact in facts]
    for place, sentence in sorted(places, reverse=True):
        filler.insert(place, sentence)
    return " ".join(filler)


def lay_out_recall(rng: Random, context: str, question: str) -> list[Message]:
    """Put context and question in one user turn, in two turns, or the context in a system turn."""
    layout = rng.random()
    if layout < 0.15:
        return [message("system", context), message("user", question)]
    system = [message("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.3 else []
    if layout < 0.3:
        reply = message("assistant", "I will remember that.")
        return [*system, message("user", context), reply, message("user", question)]
    return [*system, message("user", f"{context} {question}")]


def max_facts(num_tokens: int) -> int:
    return max(1, min(12, num_tokens // 16))


def make_recall_prompt(num_tokens: int, seed: int) -> RecallPrompt:
    """Make a chat of about `num_tokens` tokens that states some facts once and asks for one."""
    rng = Random(f"recall-{num_tokens}-{seed}")
    overhead = 14  # the question and the role markers
    facts = make_facts(rng, rng.randint(2, max(2, max_facts(num_tokens - overhead))))
    asked = rng.choice(facts)
    context = mix_with_stories(rng, facts, num_tokens - overhead)
    messages = [message("user", f"{context} {asked.question}")]
    return RecallPrompt(messages, asked.sentence, asked.value)


def ask_all(messages: list[Message], facts: Sequence[Fact]) -> Sample:
    """Answer the question that ends `messages`, about the first fact, and ask for the others."""
    turns = [*messages, message("assistant", facts[0].sentence)]
    for fact in facts[1:]:
        turns += [message("user", fact.question), message("assistant", fact.sentence)]
    return Sample(turns, "", 0)


def make_recall_sample(rng: Random, num_tokens: int) -> Sample:
    """Make a chat of about `num_tokens` tokens with stories, facts and several questions."""
    facts = make_facts(rng, rng.randint(2, max(2, max_facts(num_tokens - 24))))
    limit = min(len(facts), MAX_QUESTIONS, max(1, num_tokens // (2 * QUESTION_COST)))
    asked = rng.sample(facts, rng.randint(max(1, limit // 2), limit))
    context = mix_with_stories(rng, facts, num_tokens - QUESTION_COST * len(asked))
    sample = ask_all(lay_out_recall(rng, context, asked[0].question), asked)
    return sample._replace(num_given=len(facts))


def make_dense_sample(rng: Random, num_tokens: int) -> Sample:
    """Make a chat that has nothing but facts and a question for each of them."""
    facts = make_facts(rng, num_tokens // (QUESTION_COST + 8))
    asked = rng.sample(facts, len(facts))
    context = " ".join(fact.sentence for fact in facts)
    sample = ask_all(lay_out_recall(rng, context, asked[0].question), asked)
    return sample._replace(num_given=len(facts))


def make_pairs_sample(rng: Random, num_tokens: int) -> Sample:
    """List keys and codes, then list them again in another order."""
    count = (num_tokens - 2) // (1 + CODE_DIGITS)
    given = make_facts(rng, rng.randint(-(-count // 4), count // 2))
    asked = [fact for _ in range(-(-count // len(given))) for fact in rng.sample(given, len(given))]
    pairs = [f"{fact.key} {fact.value}" for fact in given + asked]
    return Sample([], "Codes: " + " ".join(pairs[:count]), len(given))


def make_story_sample(rng: Random) -> Sample:
    """Make a story as an answer or as plain text, or now and then a word of small talk."""
    system = [message("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.2 else []
    if rng.random() < 0.1:
        question, answer = rng.choice(SMALL_TALK)
        return Sample([*system, message("user", question), message("assistant", answer)], "", 0)
    story = make_story(rng)
    text = " ".join(story.sentences)
    if rng.random() < 0.3:
        return Sample([], text, 0)
    prompt = rng.choice(STORY_PROMPTS)
    if rng.random() < 0.4:
        prompt = prompt.replace("story", f"story about {rng.choice(story.subjects)}")
    return Sample([*system, message("user", prompt), message("assistant", text)], "", 0)
