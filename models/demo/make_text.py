#!/usr/bin/env python3
"""Writes the training text of the demo model: short children's stories from a seeded grammar.

Out: one text per line as a JSON string, either a story or a short conversation that asks for one:

    "Once upon a time, there was a little fox named Pip. ..."
    "User: Tell me a story about a fox.\\nStoryteller: One rainy morning, ..."

In a conversation of several turns the storyteller's turns but the last end with `<|eos|>`.

A story is a plot (a function below: who wants what, what goes wrong, why, how it is mended, what is learnt) told with
characters, a place and things drawn at random. A plot says each step in one of several ways. What is told stays
consistent: names, pronouns, the thing that was lost is the one that is found, where the place allows it to be.

The same seed gives the same text on every machine: only `random.Random(seed)` decides.

Usage: python make_text.py --seed 1 --count 20000 > train.jsonl
"""

import argparse
import json
import random
import sys

# --- Who, where, what -----------------------------------------------------------------------------------------------

# Few names and kinds on purpose: a small model must learn to repeat each of them, which takes many examples.
HE_NAMES = "Pip Max Tom Leo Finn Sam Ben Hugo Milo Jack Theo Oscar".split()
SHE_NAMES = "Lily Rosie Mia Clara Daisy Ruby Ella Ivy Luna Molly Anna Lucy".split()
ANIMALS = "fox rabbit bear mouse squirrel owl duck frog cat dog goat pony otter pig hen mole lion dragon robot".split()
ADJECTIVES = (
    "little small young brave curious shy cheerful clever gentle kind playful busy quiet merry friendly sleepy"
).split()

# Each place: its name, "in it", "into it", spots where something may be found, and sentences about it.
PLACES = [
    ("the forest", "in the forest", "into the forest",
     ["under a pile of leaves", "behind a fallen log", "inside a hollow tree", "between two mossy stones"],
     ["The trees were tall and green.", "The air smelled of pine.", "Birds were singing in the branches.",
      "Soft moss covered the ground."]),
    ("the meadow", "in the meadow", "into the meadow",
     ["in the tall grass", "under a patch of clover", "beside a big daisy", "behind a round bush"],
     ["Yellow flowers were everywhere.", "Butterflies danced over the grass.", "The grass was soft and warm.",
      "Bees hummed from flower to flower."]),
    ("the river", "by the river", "to the river",
     ["between the reeds", "under the old bridge", "on a flat rock", "behind a willow tree"],
     ["The water was clear and cold.", "Small fish swam in the shallow water.", "The water sparkled in the light.",
      "A blue dragonfly flew by."]),
    ("the beach", "on the beach", "to the beach",
     ["under a big shell", "in a small cave", "behind a rock", "half buried in the sand"],
     ["The waves rolled softly over the sand.", "Seagulls called in the sky.", "The sand was warm and golden.",
      "The sea was blue and wide."]),
    ("the garden", "in the garden", "into the garden",
     ["under a cabbage leaf", "behind the watering can", "next to the rose bush", "inside an empty flower pot"],
     ["Red roses grew along the wall.", "The beans were climbing up their poles.", "A snail crept over the path.",
      "Everything smelled fresh and sweet."]),
    ("the village", "in the village", "to the village",
     ["behind the bakery", "under a wooden bench", "next to the old well", "beside the clock tower"],
     ["The streets were full of people.", "The smell of fresh bread was in the air.", "The clock in the tower struck ten.",
      "Everyone was busy."]),
    ("the hill", "on the hill", "up the hill",
     ["behind a gray stone", "in a rabbit hole", "under a thorny bush", "beside the lonely tree"],
     ["From there you could see the whole valley.", "The wind blew over the grass.", "White clouds sailed by.",
      "Sheep were grazing on the slope."]),
    ("the farm", "on the farm", "to the farm",
     ["in the hay", "behind the barn", "under the old cart", "next to the milk cans"],
     ["The cows were eating grass.", "The rooster sat on the fence.", "The barn door stood open.",
      "The ducks were splashing in the pond."]),
    ("the park", "in the park", "to the park",
     ["under the slide", "behind a bench", "in the sandbox", "near the fountain"],
     ["The swings moved in the wind.", "The fountain made a soft sound.", "The benches had been painted green.",
      "Pigeons walked along the path."]),
    ("the mountain", "on the mountain", "up the mountain",
     ["behind a boulder", "in a narrow cave", "under a small pine", "on a stone ledge"],
     ["The top was white with snow.", "The air was thin and clear.", "An eagle circled high above.",
      "The path was steep and stony."]),
]

# Each thing: its name and what makes it dear.
THINGS = [
    ("red ball", "It could bounce higher than the fence."), ("blue kite", "It had a long tail with ribbons."),
    ("silver bell", "It rang with a clear sound."), ("wooden boat", "It had a real little sail."),
    ("golden key", "Nobody knew which door it opened."), ("yellow hat", "It kept the sun away."),
    ("glass marble", "There was a tiny swirl inside."), ("paper lantern", "It glowed like the moon."),
    ("green scarf", "It was warm and soft."), ("little flute", "It made sweet music."),
    ("toy train", "Its wheels really turned."), ("picture book", "It was full of ships and castles."),
    ("purple button", "It shone like a star."), ("brass compass", "It always pointed north."),
    ("music box", "It played a slow song."), ("woolen blanket", "It smelled of home."),
    ("tin drum", "It could be heard all over the valley."), ("magic stone", "It glowed in the dark."),
    ("feather pen", "It wrote in blue ink."), ("copper coin", "There was a crown on one side."),
]

# Each food: with its article, and the short word for it.
FOODS = [
    ("an apple pie", "pie"), ("a honey cake", "cake"), ("a bowl of berries", "bowl"), ("a loaf of warm bread", "bread"),
    ("a basket of plums", "basket"), ("a pot of soup", "soup"), ("a jar of jam", "jam"), ("a bag of nuts", "bag"),
    ("a plate of pancakes", "plate"), ("a big round cheese", "cheese"), ("a cherry tart", "tart"),
    ("a juicy melon", "melon"),
]

# Each skill: to learn it, the first failure, the advice, and the success.
SKILLS = [
    ("swim", "{He} splashed and kicked, but {he} swallowed a lot of water.", "Breathe slowly and move your legs gently",
     "{he} floated on the water, and then {he} swam all the way to the other side"),
    ("fly a kite", "The kite went up a little and then fell on its nose.", "Wait for the wind, and then run",
     "the kite rose up and danced among the clouds"),
    ("ride a bicycle", "The bicycle wobbled, and {he} fell into a bush.", "Look ahead and not at your feet",
     "{he} rode down the whole street without falling"),
    ("bake bread", "The bread came out of the oven as hard as a stone.", "Give the dough more time to rest",
     "the bread was soft and golden, and the whole house smelled wonderful"),
    ("play the fiddle", "It sounded like a door that needed oil.", "Hold the bow lightly and listen",
     "a lovely song filled the room"),
    ("climb the tall oak", "{He} climbed up one branch and slid down again.", "Test every branch before you step on it",
     "{he} sat at the very top and looked over the whole land"),
    ("whistle", "Only air came out.", "Make your mouth round and blow softly",
     "a clear bright whistle rang through the air"),
    ("skip stones", "Every stone fell into the water with a plop.", "Take a flat stone and throw it low",
     "the stone jumped five times over the water"),
    ("skate on the ice", "{He} slipped and sat down on the cold ice.", "Bend your knees and take small steps",
     "{he} glided over the ice like a swan"),
    ("paint a picture", "All the colors ran together and turned brown.", "Let one color dry before you add the next",
     "there was a picture of a bright red sunset"),
    ("tell stories", "{He} forgot how the story ended.", "Tell it to yourself first, step by step",
     "everyone sat very still and listened to every word"),
    ("read", "The letters seemed to jump around on the page.", "Read one word at a time, and do not hurry",
     "{he} read a whole page aloud without a mistake"),
]

# Each fear: of what, when it comes, the explanation, and the remedy.
FEARS = [
    ("thunder", "That night a storm came, and thunder rolled over the roof.",
     "Thunder is only the sound that lightning makes. It cannot hurt you in here",
     "They counted the seconds between the lightning and the thunder"),
    ("the dark", "When the sun went down, the room became very dark.",
     "The dark is only the day taking a rest. Everything is still in its place",
     "They lit a small lamp and looked at all the corners together"),
    ("the wind", "In the evening the wind began to howl around the house.",
     "The wind is only looking for a way through the trees",
     "They listened closely, and soon the howling sounded like a song"),
    ("the deep water", "One day the bridge was wet, and the water below looked deep and black.",
     "The bridge is strong. It has carried people for a hundred years",
     "They walked across hand in hand and looked only at the other side"),
    ("the old attic", "One evening there was a strange noise in the old attic.",
     "Let us look together. Most noises are smaller than they sound",
     "They climbed the stairs with a candle and found only a loose shutter"),
    ("the big dog next door", "In the morning the big dog next door barked very loudly.",
     "He barks because he is lonely. He wants to say hello",
     "They went over slowly and let the dog sniff their hands, and he wagged his tail"),
]

# Each trap: how the friend is caught, the tool, and what is done with it.
TRAPS = [
    ("stuck in the deep mud", "a long rope", "threw one end of the rope over and pulled with all {his} strength"),
    ("caught in an old net", "a sharp shell", "cut the net, one string after another"),
    ("sitting on a high branch and could not get down", "a ladder", "leaned the ladder against the tree and held it tight"),
    ("at the bottom of a deep hole", "a strong vine", "let the vine down and pulled slowly and carefully"),
    ("trapped behind a heavy stone", "a thick stick", "pushed the stick under the stone and rolled it away"),
    ("tangled in a thorny bush", "a pair of gloves", "bent the thorny branches aside, one by one"),
]

# Each mystery: what is noticed, what it turns out to be, what it needs, and how that is given.
MYSTERIES = [
    ("a soft crying sound", "a baby bird that had fallen out of its nest", "its nest",
     "lifted the bird up gently and put it back into the nest"),
    ("a faint ringing sound", "a lost lamb with a bell around its neck", "its mother",
     "led the lamb back to its mother, who was already looking for it"),
    ("a strange blue light", "a tiny star that had fallen from the sky", "a way home",
     "carried the star to the top of the highest hill and threw it back into the sky"),
    ("a quiet tapping sound", "a small turtle that was lying on its back", "a helping hand",
     "turned the turtle over and set it on its feet again"),
    ("a trail of tiny footprints", "a family of mice who had lost their home in the rain", "a dry place to sleep",
     "filled an old boot with hay and gave it to the mice"),
    ("a low humming sound", "a bee that was too tired to fly", "something sweet",
     "put a drop of honey on a leaf, and the bee drank and flew away"),
    ("a sad song", "an old man whose cart had lost a wheel", "a new wheel",
     "found the wheel in the ditch and helped the old man to put it back"),
]

# Each plant: its seed, what grew, and what was made of it.
PLANTS = [
    ("a pumpkin seed", "a huge orange pumpkin", "pumpkin soup"), ("an apple seed", "a small tree with red apples", "apple cake"),
    ("a sunflower seed", "a sunflower taller than the house", "a yellow bouquet"),
    ("a carrot seed", "the longest carrot in the village", "carrot soup"),
    ("a strawberry seed", "a patch of sweet strawberries", "strawberry jam"),
    ("a bean", "a green vine with a hundred beans", "a big pot of beans"),
    ("a melon seed", "a melon as round as the moon", "a bowl of melon for everyone"),
]

# Each broken thing: its name, how it broke, and how it was mended.
BREAKAGES = [
    ("blue vase", "was playing with a ball in the house, and the ball hit the vase", "glued the pieces together"),
    ("kitchen window", "threw a stone too far, and it hit the window", "put in a new pane of glass"),
    ("tea pot", "ran around the table too fast, and the pot fell down", "made a new handle out of clay"),
    ("garden gate", "swung on the gate until it came off", "fixed the gate with new nails"),
    ("big mirror", "danced too wildly and bumped into the mirror", "put the mirror into a new frame"),
    ("wooden chair", "used the chair as a ship, and one leg broke off", "made a new leg from a strong branch"),
]

# Each building: its name, what it is for, the weak and the strong material, and what happened to the weak one.
BUILDINGS = [
    ("raft", "cross the lake", "dry straw", "thick logs", "it soaked up the water and sank"),
    ("bridge", "reach the other side of the stream", "thin sticks", "heavy planks", "it broke in the middle"),
    ("hut", "have a place of {his} own", "leaves", "stones", "the wind blew it away"),
    ("tree house", "look at the stars", "old boxes", "good boards", "the floor fell out"),
    ("sled", "slide down the snowy hill", "paper", "smooth wood", "it fell apart at the first bump"),
    ("scarecrow", "keep the crows away from the corn", "a few feathers", "an old coat and a broom",
     "the crows sat down on it and laughed"),
]

GIFTS = [
    ("a wreath of flowers", "picked flowers all morning"), ("a birdhouse", "sawed and hammered all day"),
    ("a warm pair of socks", "knitted for three evenings"), ("a painted cup", "mixed the brightest colors"),
    ("a necklace of shells", "looked for the prettiest shells"), ("a little song", "practiced the words again and again"),
    ("a chocolate cake", "stirred and baked in secret"), ("a wooden spoon", "carved it from a piece of cherry wood"),
]

WEATHER = [
    ("sunny", "The sun was shining brightly."), ("rainy", "Rain was dripping from the roofs."),
    ("windy", "The wind was chasing the clouds."), ("snowy", "Snow lay on every branch."),
    ("foggy", "Gray fog hung over the fields."), ("warm", "A warm breeze was blowing."),
    ("cold", "The puddles were frozen."), ("bright", "There was not a cloud in the sky."),
]

TIMES = ["morning", "afternoon", "day"]


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


class Character:
    """Someone with a name, a kind ("fox", "girl") and the pronouns that go with it."""

    def __init__(self, r: random.Random, taken: tuple[str, ...] = ()):
        is_he = r.random() < 0.5
        self.name = r.choice([name for name in (HE_NAMES if is_he else SHE_NAMES) if name not in taken])
        self.kind = ("boy" if is_he else "girl") if r.random() < 0.25 else r.choice(ANIMALS)
        self.adjective = r.choice(ADJECTIVES)
        self.he, self.him, self.his = ("he", "him", "his") if is_he else ("she", "her", "her")


class Teller:
    """Puts sentences together. `say` takes several ways to say the same and picks one.

    Slots: `N` the hero, `F` the friend, each with `kind` and `adj`; `he him his He His` for the hero, `fhe fhim fhis
    Fhe Fhis` for the friend; `place at to` and whatever a plot adds.
    """

    def __init__(self, r: random.Random):
        self.r = r
        hero, friend = Character(r), None
        while friend is None or friend.kind == hero.kind:
            friend = Character(r, (hero.name,))
        self.hero, self.friend = hero, friend
        place, at, to, spots, self.sights = r.choice(PLACES)
        weather, self.weather_sentence = r.choice(WEATHER)
        self.slots = dict(
            N=hero.name, kind=hero.kind, adj=hero.adjective, a_adj=with_article(hero.adjective), a_kind=with_article(hero.kind),
            he=hero.he, him=hero.him, his=hero.his, He=hero.he.capitalize(), His=hero.his.capitalize(),
            F=friend.name, fkind=friend.kind, fadj=friend.adjective, a_fkind=with_article(friend.kind),
            a_fadj=with_article(friend.adjective),
            fhe=friend.he, fhim=friend.him, fhis=friend.his, Fhe=friend.he.capitalize(), Fhis=friend.his.capitalize(),
            place=place, at=at, to=to, spot=r.choice(spots), weather=weather, time=r.choice(TIMES),
        )
        self.parts: list[str] = []
        self.topic = ""

    def add(self, **slots: str) -> None:
        """New slots, which may use the old ones."""
        for key, value in slots.items():
            self.slots[key] = value.format(**self.slots)

    def say(self, *ways: str) -> None:
        self.parts.append(self.r.choice(ways).format(**self.slots))

    def maybe(self, share: float, *ways: str) -> None:
        if self.r.random() < share:
            self.say(*ways)

    def paragraph(self) -> None:
        self.parts.append("\n")

    def text(self) -> str:
        return " ".join(self.parts).replace(" \n ", "\n").strip()

    # --- Parts that many plots share

    def opening(self) -> None:
        self.say(
            "Once upon a time, there was {a_adj} {kind} named {N}.",
            "Once upon a time, there was {a_adj} {kind} named {N}.",
            "Once upon a time, {a_adj} {kind} named {N} lived near {place}.",
            "There once was {a_adj} {kind} called {N}.",
            "In a house near {place} lived {a_adj} {kind} named {N}.",
            "Long ago, {a_adj} {kind} named {N} lived near {place}.",
            "{N} was {a_adj} {kind} who lived near {place}.",
        )

    def one_day(self, *ways: str) -> None:
        """Begins the action; each way can go on after "One sunny morning, "."""
        way = self.r.choice(ways)
        if self.r.random() < 0.25:
            way = way.format(**self.slots)
            self.say("It was a {weather} {time}.")
            self.say(self.weather_sentence)
            self.parts.append(way[0].upper() + way[1:])
        else:
            self.say(*(lead + way for lead in ("One {weather} {time}, ", "One {time}, ", "It was a {weather} {time}, and ")))

    def sight(self, share: float = 0.5) -> None:
        self.maybe(share, *self.sights)

    def ending(self, *lessons: str) -> None:
        if self.r.random() < 0.7:
            self.say(*lessons)
        self.maybe(
            0.45,
            "And they lived happily ever after.",
            "That night, {N} fell asleep with a smile.",
            "It was the best day of the whole year.",
            "Then everyone went home for supper.",
            "And that is the end of the story.",
            "When the stars came out, {N} was still smiling.",
            "The moon rose over {place}, and all was quiet.",
        )


# --- Plots ----------------------------------------------------------------------------------------------------------


def lost_thing(t: Teller) -> None:
    thing, dear = t.r.choice(THINGS)
    t.add(thing=thing, a_thing=with_article(thing))
    t.topic = "a lost " + thing
    t.opening()
    t.say("{N} had {a_thing}.", "{N} loved {his} {thing} more than anything else.", "{His} favorite thing was {a_thing}.")
    t.maybe(0.7, dear, "It had been a gift from {his} grandmother.")
    t.one_day("{N} went {to} to play.", "{N} took the {thing} and went {to}.")
    t.sight()
    t.paragraph()
    t.say("But when {he} came home, the {thing} was gone.", "After a while {he} looked around, and the {thing} was gone.",
          "{N} ran and jumped and forgot about the {thing}. Then it was gone.")
    t.say('"Oh no!" cried {N}. "Where is my {thing}?"', "{N} looked everywhere, but {he} could not find it.",
          "{He} looked in every pocket, but it was not there. {N} began to cry.")
    t.say("Just then {F} the {fkind} came by.", "{His} friend {F}, {a_fadj} {fkind}, heard {him}.",
          "{F} the {fkind} saw that {N} was sad.")
    t.say('"What is wrong?" asked {F}. "I lost my {thing}," said {N}.', '"Do not cry," said {F}. "I will help you look."',
          '"Where did you see it last?" asked {F}. "{At}," said {N}.'.replace("{At}", t.slots["at"].capitalize()))
    t.paragraph()
    t.say("They went back together and looked in every corner.", "So the two friends walked {to} and searched for a long time.",
          "They looked high and they looked low.")
    t.say("At last, {F} found the {thing} {spot}.", "Then {N} saw something {spot}. It was the {thing}!",
          '"Look!" said {F}. The {thing} was lying {spot}.')
    t.say('"Thank you!" said {N} and hugged {F}.', "{N} was so happy that {he} danced around {F}.",
          '"You are a good friend," said {N}.')
    t.ending("From that day on, {N} took good care of the {thing}.", "After that, {N} always shared the {thing} with {F}.",
             "{N} learned that looking is easier with a friend.", "Now {N} and {F} play with the {thing} every day.")


def rescue(t: Teller) -> None:
    trap, tool, act = t.r.choice(TRAPS)
    t.add(trap=trap, tool=tool, act=act, short_tool=tool.split(" ", 1)[1])
    t.topic = "helping a friend"
    t.opening()
    t.maybe(0.6, "{N} liked to take long walks.", "{N} always carried a small bag with useful things.", "{He} knew every path near {place}.")
    t.one_day("{N} was walking {at} when {he} heard a voice.", "{N} went {to} and heard someone call for help.")
    t.sight(0.3)
    t.say('"Help! Help!" cried the voice.', '"Is anybody there?" called the voice. "Please help me!"')
    t.paragraph()
    t.say("It was {F} the {fkind}. {Fhe} was {trap}.", "{N} ran to the place and saw {F}, {a_fadj} {fkind}, who was {trap}.")
    t.say('"How did this happen?" asked {N}. "I was not looking where I was going," said {F}.',
          '"Do not be afraid," said {N}. "I will get you out."', '"Please hurry," said {F}. "It is getting late."')
    t.say("First {N} tried it with bare hands, but that did not work.", "{N} tried and tried, but {he} was not strong enough.")
    t.say("Then {he} had an idea.", "{He} sat down and thought hard.", "{N} thought for a moment.")
    t.say("{He} ran home and came back with {tool}.", "Nearby {he} found {tool}.", "In {his} bag there was {tool}.")
    t.say("{N} {act}.", "Carefully, {N} {act}.")
    t.say("At last {F} was free.", "After a while {F} was free again.", "It took a long time, but at last {F} was free.")
    t.paragraph()
    t.say('"You saved me!" said {F}.', '"Thank you, {N}," said {F}. "I will never forget this."',
          "{F} laughed and cried at the same time.")
    t.say("To say thank you, {F} invited {N} to a big supper.", "Then {F} gave {N} a shiny red apple.", "The two of them walked home together.")
    t.ending("From that day on, they were best friends.", "And whenever {N} needed help, {F} was there.",
             "{N} learned that a good idea can be stronger than strong arms.")


def new_skill(t: Teller) -> None:
    skill, failure, advice, success = t.r.choice(SKILLS)
    t.add(skill=skill, failure=failure, advice=advice, success=success)
    t.topic = "learning to " + skill
    t.opening()
    t.say("More than anything, {N} wanted to {skill}.", "{N} had one big wish. {He} wanted to {skill}.", "{N} could do many things, but {he} could not {skill}.")
    t.one_day("{N} tried it for the first time.", "{N} decided to learn it.")
    t.say("{failure}", "It did not go well. {failure}")
    t.say('"I will never learn it," said {N}.', '"This is too hard for me," {he} said sadly.', "{N} was so angry that {he} stamped {his} foot.")
    t.paragraph()
    t.say("An old friend, {F} the {fkind}, was watching.", "{F} the {fkind} came by and smiled.", "Then {N} met {F}, {a_fadj} {fkind} who knew how to {skill}.")
    t.say('"{advice}," said {F}.', '"I also had to learn it once," said {F}. "{advice}."', '"Do not give up," said {F}. "{advice}."')
    t.say("{N} tried again the next day, and the day after that.", "So {N} practiced every morning.", "{N} practiced until the sun went down.")
    t.maybe(0.5, "Each time it went a little better.", "Sometimes {he} wanted to stop, but {he} kept going.", "{F} sat beside {him} and cheered.")
    t.paragraph()
    t.say("Then one day, {success}.", "And after one week, {success}.", "At last, {success}.")
    t.say('"I did it!" shouted {N}.', '"Look at me!" cried {N}.', "{N} was very proud.")
    t.maybe(0.6, '"I knew you could do it," said {F}.', "{F} clapped loudly.")
    t.ending("{N} had learned that nobody can do everything on the first day.", "Now {N} teaches all of {his} friends to {skill}.",
             "From then on, {N} never said that something was too hard.")


def sharing(t: Teller) -> None:
    food, short = t.r.choice(FOODS)
    t.add(food=food, short=short)
    t.topic = "sharing"
    t.opening()
    t.one_day("{N} got {food} from {his} aunt.", "{N} made {food} all by {himself}.".replace("{himself}", t.hero.him + "self"), "{N} found {food} on the doorstep.")
    t.say("It smelled so good!", "{N} could hardly wait to eat.", '"This is all for me," said {N}.')
    t.say("{He} carried it {to} and sat down.", "{He} took it {to} to eat in peace.")
    t.sight(0.4)
    t.paragraph()
    t.say("Soon {F} the {fkind} came along.", "Then {F}, {a_fadj} {fkind}, walked by.")
    t.say('"I have not eaten all day," said {F}. "May I have a little?"', '"That looks good," said {F}. "I am so hungry."')
    t.say('"No," said {N}. "There is not enough."', '{N} hid the {short} behind {his} back. "I have nothing," {he} said.', '"It is mine," said {N} and turned away.')
    t.say("{F} went away with {fhis} head down.", "{F} said nothing and walked away slowly.")
    t.say("{N} began to eat, but somehow it did not taste good.", "{N} took one bite. Suddenly {he} was not happy at all.")
    t.say("{He} kept thinking of {F}.", "It is no fun to eat alone, {he} thought.")
    t.paragraph()
    t.say('{N} jumped up and ran after {F}. "Wait!" {he} called. "Come and eat with me!"', '"{F}!" called {N}. "I am sorry. Please come back and share with me."')
    t.say("They sat side by side and ate until nothing was left.", "They shared the {short}, and each of them got half.")
    t.say("Now it tasted better than anything in the world.", '"It tastes much better now," said {N}.', "They laughed and told each other jokes.")
    t.ending("{N} learned that good things become better when you share them.", "The next day, {F} brought a cake for {N}.",
             "After that, {N} never ate alone again.")


def fear(t: Teller) -> None:
    what, moment, explanation, remedy = t.r.choice(FEARS)
    t.add(what=what, moment=moment, explanation=explanation, remedy=remedy)
    t.topic = "being brave"
    t.opening()
    t.say("{N} was not afraid of spiders, and {he} was not afraid of mice. But {he} was afraid of {what}.", "There was only one thing that {N} was afraid of: {what}.",
          "{N} was afraid of {what}, but {he} did not tell anyone.")
    t.say("{moment}")
    t.say("{N} began to shake.", "{N} hid under the table.", "{His} heart beat fast.", "{N} wanted to run away.")
    t.paragraph()
    t.say("{F} the {fkind} was there and took {his} hand.", "{His} friend {F}, {a_fadj} {fkind}, saw it and came closer.", "Then {F} the {fkind} came in.")
    t.say('"What is the matter?" asked {F}. "I am afraid of {what}," {N} whispered.', '"Are you afraid?" asked {F}. {N} nodded.')
    t.say('"{explanation}," said {F}.', '"I used to be afraid too," said {F}. "{explanation}."')
    t.say("{remedy}.")
    t.say("Little by little, {N} grew calm.", "Soon {N} was not shaking anymore.", "After a while {N} even smiled.")
    t.paragraph()
    t.say('"It is not so bad," said {N}.', '"Was that all?" asked {N} and laughed.', '"Thank you for staying with me," said {N}.')
    t.ending("From that day on, {N} was never afraid of {what} again.", "Being brave does not mean that you have no fear. It means that you go on with a friend.",
             "The next time, {N} was the one who helped somebody else.")


def mystery(t: Teller) -> None:
    sign, source, need, act = t.r.choice(MYSTERIES)
    t.add(sign=sign, source=source, need=need, act=act, verb="heard" if "sound" in sign or "song" in sign else "saw")
    t.topic = sign
    t.opening()
    t.maybe(0.6, "{N} always wanted to know everything.", "{N} asked a hundred questions a day.", "{He} loved to explore.")
    t.one_day("{N} and {his} friend {F} the {fkind} went {to}.", "{N} was {at} with {F}, {a_fadj} {fkind}.")
    t.sight()
    t.say("Suddenly they {verb} {sign}.", "Then {N} stopped. {He} {verb} {sign}.")
    t.say('"What could that be?" asked {F}.', '"Did you notice that?" whispered {N}.')
    t.maybe(0.5, '"Perhaps it is a monster," said {F}.', '"I think we should go home," said {F}.')
    t.say('"Let us find out," said {N}.', '"We must go and look," said {N}.')
    t.paragraph()
    t.say("They walked on very quietly.", "They crept closer, step by step.", "They followed it for a long time.")
    t.say("And there, {spot}, was {source}.", "Then they found it. It was {source}, {spot}.")
    t.say('"Poor thing," said {N}. "It needs {need}."' if "old man" not in source and "mice" not in source else '"We must help," said {N}. "What is needed here is {need}."',
          "{N} knew at once what was needed: {need}.")
    t.say("So {N} {act}.", "Together they thought about it. Then {N} {act}.")
    t.paragraph()
    t.say('"That was a kind thing to do," said {F}.', "{F} was glad that they had not run away.", '"And I thought it was a monster," laughed {F}.')
    t.ending("On the way home they talked about nothing else.", "{N} learned that it is good to look before you are afraid.",
             "Since then, the two friends have solved many mysteries.")


def garden(t: Teller) -> None:
    seed, grown, meal = t.r.choice(PLANTS)
    t.add(seed=seed, grown=grown, meal=meal)
    t.topic = "growing a plant"
    t.opening()
    t.one_day("{N} found {seed} on the path.", "an old woman gave {N} {seed}.", "{N} bought {seed} at the market.")
    t.say("{He} made a hole in the ground and put it in.", "{N} planted it behind the house.", "{He} planted it in the best spot and covered it with earth.")
    t.say("Every morning {he} gave it water.", "Every day {N} watered it and pulled out the weeds.")
    t.paragraph()
    t.say("But nothing happened.", "A week went by, and nothing could be seen.")
    t.say('{F} the {fkind} looked over the fence. "Nothing will ever grow there," {fhe} said.', '"You are wasting your time," said {F} the {fkind}.',
          "{F}, {a_fadj} {fkind} from next door, only laughed.")
    t.say('"We will see," said {N}, and {he} went on.', '"Good things need time," said {N}.', "{N} was a little sad, but {he} did not give up.")
    t.maybe(0.6, "The rain fell, and the sun shone.", "When it was too hot, {N} made a roof of leaves.", "{N} even sang to the earth.")
    t.paragraph()
    t.say("Then one morning there was a tiny green leaf.", "After many days, something green came out of the ground.")
    t.say("It grew and grew, and by the end of summer there was {grown}.", "At the end of the summer, {N} had {grown}.")
    t.say('"I was wrong," said {F}. "It is wonderful!"', "{F} could not believe {fhis} eyes.")
    t.say("{N} made {meal} and invited everyone, even {F}.", "{N} was not angry. {He} made {meal} and gave {F} the first piece." if "bouquet" not in meal and "bowl" not in meal
          else "{N} was not angry. {He} made {meal} and called {F} over.")
    t.ending("Since then, {F} helps {N} in the garden.", "{N} had known all along that good things need time.", "The next spring they planted a whole row together.")


def race(t: Teller) -> None:
    t.topic = "a race"
    third = Character(t.r, (t.hero.name, t.friend.name))
    t.add(third="{T} the {tkind}".replace("{T}", third.name).replace("{tkind}", third.kind), T=third.name, him3=third.him)
    t.opening()
    t.one_day("there was a big race {at}.", "all the neighbors met for a race {at}.")
    t.sight(0.4)
    t.say("{F} the {fkind} was the fastest of all.", "Everyone thought that {F} the {fkind} would win.")
    t.say('"Nobody can beat me," said {F}.', '"You are far too slow," {F} said to {N}.')
    t.say('"I will do my best," said {N}.', "{N} only smiled and tied {his} shoes.")
    t.paragraph()
    t.say("One, two, three, and off they went!", "The bell rang, and the race began.")
    t.say("{F} ran ahead at once, and {N} was far behind.", "Soon {F} was so far ahead that nobody could see {fhim}.")
    way = t.r.randrange(2)
    if way == 0:
        t.say('"I have plenty of time," said {F}. {Fhe} lay down under a tree and fell asleep.', "{F} stopped to eat berries and forgot the time.")
        t.say("{N} went on, step by step.", "{N} did not stop once.")
        t.paragraph()
        t.say("When {F} woke from {fhis} dream and ran to the finish, {N} was already there." if "asleep" in t.parts[-3] else "When {F} remembered the race and ran to the finish, {N} was already there.")
        t.say('"Slow and steady wins the race," said {N} kindly.', "Everyone cheered for {N}.")
        t.say('"I should not have laughed at you," said {F}.', "{F} shook {his} hand and said, \"Well done.\"")
        t.ending("From that day on, {F} never boasted again.", "Now {N} and {F} run together every morning.")
    else:
        t.say("Then {N} saw {third} sitting by the path with a hurt foot.", "Halfway along the path, {third} had fallen and could not get up.")
        t.say('"You will lose if you stop," said {T}. "That does not matter," said {N}.', "{N} stopped at once, although {he} wanted to win.")
        t.say("{He} took {him3} by the arm, and they walked on together.", "{He} carried {him3} on {his} back all the way.")
        t.paragraph()
        t.say("{F} had won, but everybody cheered for {N}.", "They came in last, but the cheers were louder than for anyone else.")
        t.say("{F} looked at the golden cup and gave it to {N}. \"You are the real winner,\" {fhe} said.", "The judge gave {N} a special prize for a kind heart.")
        t.ending("{N} learned that there are more important things than winning.", "And {T} never forgot it.")


def broken_thing(t: Teller) -> None:
    thing, how, mended = t.r.choice(BREAKAGES)
    t.add(thing=thing, how=how, mended=mended)
    t.topic = "telling the truth"
    who = t.r.choice([("mother", "she", "her"), ("father", "he", "his"), ("grandmother", "she", "her"), ("grandfather", "he", "his"), ("uncle", "he", "his")])
    t.add(parent=who[0], phe=who[1], phis=who[2], Phe=who[1].capitalize())
    t.opening()
    t.one_day("{N} {how}.", "{N} was all alone. {He} {how}.")
    t.say("Crash! The {thing} was broken.", "There was a loud noise, and the {thing} was broken.")
    t.say("It belonged to {his} {parent}.", "{His} {parent} had always liked it very much.")
    t.say("{N} was scared and hid behind the door.", '"What shall I do now?" thought {N}.', "{N} quickly put a cloth over it and ran outside.")
    t.paragraph()
    t.say("{He} met {F} the {fkind} and told {fhim} everything.", "Outside, {F}, {a_fadj} {fkind}, asked, \"Why do you look so pale?\" So {N} told {fhim} the story.")
    t.say('"Just say that the cat did it," said {F}. But {N} shook {his} head. "That would be a lie."', '"You should tell the truth," said {F}. "It will be hard, but then it will be over."')
    t.say("In the evening, {N} went to {his} {parent}.", "So {N} took a deep breath and went home.")
    t.say('"I broke the {thing}," {he} said. "I am very sorry."', '"It was me," {he} said quietly. "I broke the {thing}."')
    t.paragraph()
    t.say("{His} {parent} was silent for a moment. Then {phe} smiled.", "{His} {parent} looked at the {thing} and then at {N}.")
    t.say('"A {thing} can be mended," {phe} said. "I am glad that you told me the truth."', '"Thank you for being honest," {phe} said. "That is worth more than any {thing}."')
    t.say("Together they {mended}.", "The next day they {mended}, and {N} was allowed to help.")
    t.ending("{N} felt as light as a feather.", "And {N} never hid a mistake again.", "It looked almost like new, and {N} was glad.")


def newcomer(t: Teller) -> None:
    thing, _ = t.r.choice(THINGS)
    t.add(thing=thing, a_thing=with_article(thing))
    t.topic = "a new friend"
    t.opening()
    t.maybe(0.5, "{N} had many friends, and they played {at} every day.", "{N} often played alone and wished for a friend.")
    t.one_day("a new family moved into the house next door.", "somebody new came to {place}.")
    t.say("It was {F}, {a_fadj} {fkind}.", "Their child was {a_fadj} {fkind} named {F}." if "family" in t.parts[-1] else "{Fhis} name was {F}, and {fhe} was {a_fkind}.")
    t.say("{F} did not know anyone and sat all alone {spot}.", "{F} stood {spot} and looked at the ground.")
    t.say('"Look how strange {fhe} is," said the others.', '"{Fhe} never says a word," said the others.', "The others did not want to play with {fhim}.")
    t.paragraph()
    t.say("But {N} remembered how it feels to be alone.", "{N} felt sorry for {F}.", "{N} wanted to be kind.")
    t.say("{He} went over and showed {F} {his} {thing}.", '{He} held out {his} {thing}. "Would you like to play with me?" {he} asked.')
    t.say("At first {F} was too shy to answer.", "{F} looked up in surprise.")
    t.say('Then {fhe} smiled. "Yes, please," {fhe} said.', 'Then {fhe} said softly, "I have never had a friend before."')
    t.say("They played until the sun went down.", "They went {to} and played all afternoon.")
    t.paragraph()
    t.say("It turned out that {F} knew the funniest games.", "It turned out that {F} could tell wonderful stories.", "{F} knew songs that nobody had ever heard.")
    t.say("Soon the others came and asked if they could join in.", "The next day, everyone wanted to play with {F}.")
    t.ending("{N} and {F} stayed friends for the rest of their lives.", "One kind word had been enough.", "And nobody {at} ever had to sit alone again.")


def gift(t: Teller) -> None:
    present, work = t.r.choice(GIFTS)
    t.add(present=present, work=work)
    t.topic = "a birthday"
    t.opening()
    t.say("{His} best friend was {F}, {a_fadj} {fkind}.", "{N} had a good friend, {F} the {fkind}.")
    t.say("Tomorrow was the birthday of {F}, and {N} had no present.", "{F} had a birthday soon, and {N} wanted to give {fhim} something special.")
    t.say("{N} opened {his} purse, but it was empty.", "In the shop everything cost too much.", "{N} had only one small coin.")
    t.say('"Then I will make something myself," said {N}.', 'Then {he} thought, "I have two hands. I can make something."')
    t.paragraph()
    t.say("{He} went {to} and looked for ideas.", "So {he} sat down {at} and thought.")
    t.sight(0.4)
    t.say("Then {N} {work}. It became {present}.", "{N} wanted to give {fhim} {present}. {He} {work}.")
    t.maybe(0.5, "It was not perfect, but it was made with love.", "{N} worked until late at night.", "More than once {he} had to start again.")
    t.paragraph()
    t.say("On the birthday, all the guests brought big boxes.", "The other guests had bought expensive things.")
    t.say("{N} felt small and wanted to go home.", "{N} was almost ashamed of {his} present.")
    t.say('But when {F} saw it, {fhis} eyes began to shine. "You made this for me?" {fhe} asked.', 'But {F} hugged {him} and said, "This is the best present of all."')
    t.say("{N} turned red with joy.", '"Happy birthday, {F}," said {N}.')
    t.ending("{F} has kept it to this day.", "{N} learned that a gift from the heart is worth more than gold.", "Then they all danced and sang until midnight.")


def building(t: Teller) -> None:
    thing, purpose, weak, strong, failure = t.r.choice(BUILDINGS)
    t.add(thing=thing, a_thing=with_article(thing), purpose=purpose, weak=weak, strong=strong, failure=failure)
    t.topic = "building " + with_article(thing)
    t.opening()
    t.say("{N} wanted to {purpose}.", "For a long time, {N} had wanted to {purpose}.")
    t.say('"I will build {a_thing}," {he} said.', "So {he} decided to build {a_thing}.")
    t.say("{He} was in a hurry and used {weak}.", "{N} took {weak}, because that was quick and easy.")
    t.say('"That will not hold," said {F} the {fkind}. But {N} did not listen.', '{F}, {a_fadj} {fkind}, asked, "Are you sure that is strong enough?" "Of course," said {N}.')
    t.paragraph()
    t.say("It was finished before noon.", "In one hour the {thing} was ready.")
    t.say("But then {failure}.", "{N} was proud, but not for long, because {failure}.")
    t.say("{N} sat in the middle of the mess and sighed.", '"All that work for nothing!" cried {N}.', "Luckily, {N} was not hurt.")
    t.say('"Next time I will listen to you," {he} said to {F}.', '"You were right," {he} said to {F}. "Will you help me?"')
    t.paragraph()
    t.say("This time they used {strong}.", "Together they brought {strong} and started again.")
    t.say("The work was hard, and it took three days.", "They worked slowly and checked every part twice.", "{F} measured, and {N} hammered.")
    t.say("When it was done, the {thing} was strong and beautiful.", "Then the new {thing} stood there, and nothing could break it.")
    t.say("At last {N} could {purpose}, and {F} came along." if "his" not in purpose else "At last {N} had a place of {his} own, and {F} was the first guest.",)
    t.ending("{N} learned that good work takes time.", "Since then, {N} always asks {F} before {he} builds something.", "It is still there today.")


PLOTS = [lost_thing, rescue, new_skill, sharing, fear, mystery, garden, race, broken_thing, newcomer, gift, building]

# --- Texts ----------------------------------------------------------------------------------------------------------

END = "<|eos|>"


def story(r: random.Random) -> Teller:
    teller = Teller(r)
    r.choice(PLOTS)(teller)
    return teller


def rhyme(r: random.Random) -> str:
    """The warm-up: short sentences about one to three characters, where little but the names has to be guessed.

    Here a model finds out within some hundred steps that a name comes back; in whole stories that takes it much longer.
    """
    people, count = [], r.choice([1, 2, 2, 3])
    while len(people) < count:
        people.append(Character(r, tuple(person.name for person in people)))
    lines = [f"{p.name} was {with_article(p.adjective)} {p.kind}." for p in people]
    for _ in range(r.randint(8, 16)):
        p, q = r.choice(people), r.choice(people)
        lines.append(r.choice([
            f"{p.name} sat down.", f"{p.name} ran home.", f"{p.name} laughed.", f'"I am here," said {p.name}.',
            f"{p.name} the {p.kind} was happy.", f"It was {p.name} the {p.kind}.", f"Then {p.name} came back.",
            f"{p.name} smiled, and {q.name} smiled too." if p is not q else f"{p.name} smiled.",
            f'"Thank you, {p.name}," said {q.name}.' if p is not q else f"Everyone liked {p.name}.",
        ]))
    return " ".join(lines)


def request(r: random.Random, t: Teller) -> str:
    """A question that the story of `t` answers."""
    hero, friend = t.slots["a_kind"], t.slots["a_fkind"]
    subject = r.choice([hero, hero, f"{hero} named {t.hero.name}", f"{hero} and {friend}", t.topic])
    return r.choice([
        "Tell me a story about {}.", "Tell me a story about {}.", "Please tell me a story about {}.",
        "Can you tell me a story about {}?", "I would like to hear a story about {}.", "Tell me about {}.",
        "Write a short story about {}.", "Once more, please. A story about {}.",
    ]).format(subject)


def conversation(r: random.Random) -> str:
    turns = []
    if r.random() < 0.15:
        turns.append((r.choice(["Hello.", "Hi!", "Good evening.", "Hello, who are you?", "Hi there."]),
                      r.choice(["Hello! I am the storyteller. What shall the story be about?", "Good evening! Which story would you like to hear?",
                                "Hello! I know many stories. Who shall be in yours?"])))
    t = story(r)
    open_request = r.random() < 0.15
    question = r.choice(["Tell me a story.", "Please tell me a story.", "I can not sleep. Tell me a story."]) if open_request else request(r, t)
    turns.append((question, t.text()))
    if r.random() < 0.12:
        turns.append((r.choice(["Thank you!", "That was nice.", "Thank you. Good night."]),
                      r.choice(["You are welcome. Good night, and sweet dreams!", "I am glad that you liked it. Come back soon!",
                                "You are welcome. Shall I tell you another one?"])))
    return (END + "\n").join(f"User: {user}\nStoryteller: {answer}" for user, answer in turns)


def texts(seed: int, count: int):
    """`count` texts, all different; a third of them are conversations."""
    r = random.Random(seed)
    seen = set()
    while len(seen) < count:
        text = conversation(r) if r.random() < 1 / 3 else story(r).text()
        if text not in seen:
            seen.add(text)
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20000, help="number of texts")
    options = parser.parse_args()
    for text in texts(options.seed, options.count):
        sys.stdout.write(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
