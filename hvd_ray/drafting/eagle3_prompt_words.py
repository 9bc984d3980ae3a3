# ruff: noqa: E501 - templates read best one a line
"""Word lists and templates for `eagle3_prompts`; all of it written for this project."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def json_text(value: object) -> str:
    """JSON as people paste it into prompts: one line, ASCII left alone."""
    return json.dumps(value, ensure_ascii=False)


def _words(text: str) -> list[str]:
    """Entries parted by bars or line ends."""
    return text.replace("\n", "|").split("|")


def _lines(text: str) -> list[str]:
    """One template a line; a written backslash-n stands for a line end inside a template."""
    return [line.replace("\\n", "\n") for line in text.split("\n")]


TOPICS = _words(
    """black holes|sourdough bread|urban gardening|renewable energy|the water cycle|chess
openings|remote work|personal budgeting|machine learning|coral reefs|the immune system|jazz music
electric cars|ancient Rome|public speaking|time management|sleep hygiene|photosynthesis|volcanoes
beekeeping|climate change|the stock market|learning a language|road cycling|mountain hiking
data privacy|open source software|cloud computing|database indexes|unit testing|recycling
volunteering|school lunches|public transport|wind turbines|the printing press|bridges|submarines
honey bees|penguins|migratory birds|tea ceremonies|coffee roasting|pottery|oil painting
street photography|film editing|video games|board games|football tactics|marathon training|yoga
meditation|nutrition|vaccines|antibiotics|first aid|dental care|knee injuries|allergies|diabetes
the French Revolution|the Silk Road|the moon landing|the Industrial Revolution|railways
the ozone layer|glaciers|hurricanes|earthquakes|deserts|rainforests|rivers|tides|soil health
composting|crop rotation|fishing quotas|forest fires|solar panels|nuclear power|batteries|3D printing
robotics|self-driving cars|drones|satellites|telescopes|quantum computers|encryption|passwords
phishing|spreadsheets|project planning|job interviews|writing a resume|negotiating a salary
starting a small business|customer service|online marketing|product design|user interviews
team meetings|conflict resolution|parenting a toddler|adopting a dog|training a puppy|cats|aquariums
houseplants|home insulation|plumbing repairs|bicycle maintenance|car insurance|mortgages|inflation
interest rates|taxes|elections|constitutions|human rights|international trade|urban planning
architecture|Gothic cathedrals|opera|poetry|science fiction|fairy tales|mythology|philosophy of mind
ethics|probability|prime numbers|geometry|statistics|calculus|graph theory|game theory|algorithms
HTTP caching|version control|continuous integration|containers|message queues|regular expressions
microservices|accessibility on the web|technical documentation|code review|debugging|recursion
Mediterranean cooking|vegetarian recipes|fermentation|knife skills|holiday traditions|weddings
travel on a budget|packing a suitcase|jet lag|camping|sailing|skiing|surfing|swimming|tennis|dance"""
)

PEOPLE = _words(
    """a ten-year-old|a busy manager|a retired teacher|a first-year student|a new employee
a tourist|a software engineer|a nurse|a small shop owner|my grandmother|a high school class
a journalist|a farmer|a beginner|a skeptical customer"""
)

PLACES = _words(
    """Lisbon|Nairobi|Kyoto|Toronto|Buenos Aires|Oslo|Prague|Cape Town|Seattle|Mumbai|Lima
Helsinki|Vienna|Cairo|Hanoi|Dublin|Warsaw|Athens|Denver|Boston|Montreal|Hamburg|Zurich|Lyon
Valencia|Porto|Krakow|Bergen|Osaka|Manila|Accra|Santiago|Austin|Chicago|Leeds|Geneva"""
)

THINGS = _words(
    """telephone|steam engine|bicycle|light bulb|microscope|compass|paper|zipper|radio|camera
thermometer|elevator|refrigerator|telescope|piano|umbrella|clock|helicopter|laser|transistor
parachute|stethoscope|typewriter|battery|airship|lighthouse"""
)

NAMES = _words(
    """Amara Diallo|Jonas Weber|Priya Raman|Lucia Ferrari|Tom Becker|Mei Chen|Omar Haddad
Sofia Novak|Daniel Osei|Hanna Lind|Pedro Alves|Grace Kim|Ivan Petrov|Nora Walsh|Samir Patel
Elena Costa|Victor Hugo Lima|Aisha Bello|Karl Jensen|Yuki Tanaka|Ruth Adler|Marcus Reed
Chloe Martin|Felix Braun|Dana Levi|Owen Clarke|Ines Moreau|Leo Rossi"""
)

TONES = _words("friendly|formal|humorous|persuasive|calm|enthusiastic|neutral|apologetic")

ITEMS = _words(
    """apples|notebooks|marbles|tickets|cupcakes|pencils|stickers|books|bottles|shirts|candles
chairs|lamps|eggs|oranges|postcards|toy cars|bags of rice|plants|keyboards|mugs|cookies"""
)

EVENTS = _words(
    """a new bridge opens to traffic|a local team wins the championship|a storm closes schools
a museum announces a new exhibition|the city council votes on a housing plan|a factory adds 300 jobs
scientists publish a study on air quality|a hospital opens a new wing|a train line is delayed again
a music festival sells out|a library extends its opening hours|a company recalls a product
volunteers clean a river|a bakery celebrates its centenary|a court rules on a land dispute
an airline cancels dozens of flights|a student wins a science prize|farmers protest new rules
a painting is found in an attic|a power cut darkens the old town|a wildfire is contained
a university launches a free course|police return a stolen bicycle collection|a mayor resigns
a rare bird is seen in a park|a startup raises money for water filters"""
)

CHAT = _lines(
    r"""What are {num} tips for someone getting started with {topic}?
Explain {topic} to {person}.
Write a short poem about {topic}.
Compare {topic} and {other}. What do they have in common?
Write a {tone} email to a colleague about {topic}.
What are the advantages and disadvantages of {topic}?
Give me {num} interesting facts about {topic}.
Can you help me plan a weekend in {place} around {topic}?
Write a short story that takes place in {place} and involves {topic}.
How has {topic} changed over the last fifty years?
What should I know about {topic} before I talk to {person}?
Draft a {tone} social media post about {topic}.
Describe a typical day in {place} for {person}.
Suggest {num} titles for a blog post on {topic}.
What is the most common misunderstanding about {topic}?
Write an outline for a presentation on {topic} for {person}.
Pretend you are {person}. What would you say about {topic}?
List {num} questions to ask an expert on {topic}.
Summarize the history of {topic} in one paragraph.
Why do people care about {topic}?
Write a {tone} reply to a customer who is unhappy with our course on {topic}.
How do I teach {topic} to {person}?
Create a one-week study plan for {topic}.
What would happen if {topic} disappeared overnight?
Write a dialogue between {person} and an expert on {topic}.
Is it true that {topic} matters more than {other}? Give reasons.
Give step-by-step instructions for a beginner interested in {topic}.
Write {num} multiple-choice questions about {topic} with answers.
Imagine a debate about {topic}. Give one argument for each side.
Write a cover letter for a job that involves {topic} in {place}.
Recommend {num} habits that help with {topic}. Answer in fewer than 150 words.
What's the best way to start with {topic}?
Tell me about {topic}.
I'm feeling overwhelmed by {topic}. What can I do?"""
)

QUESTIONS = _lines(
    r"""What is the capital of the country where {place} lies?
Who invented the {thing}?
When was the {thing} invented?
How does a {thing} work?
What is {topic} in simple terms?
Which year did the first {thing} appear?
How many people live in {place}?
What language is spoken in {place}?
What is {place} best known for?
who is the most famous person born in {place}
what happened in {year} in {place}
where does the word for {thing} come from
when did people first write about {topic}
what is the difference between {topic} and a {thing}
how long does it take to travel to {place} by train
why is {topic} important
what are the main parts of a {thing}
who discovered the principle behind the {thing}
what time zone is {place} in
how much does a {thing} usually cost
what is the meaning of {topic}
which river flows through {place}
in which century was the {thing} invented
what are the causes of problems with {topic}
who first won a prize for work on {topic}
is the {thing} older than the year {year}?"""
)

ARTICLES = _lines(
    r"""Write a news article of about 300 words: {event} in {place}.
Write a long news report about this: {event} near {place}. Quote {person}.
Write an encyclopedia entry about {topic}.
Write a detailed blog article about {topic} for readers in {place}.
Write a report of about 300 words on {topic} and its effect on {place}.
Write a magazine profile of {person}, who works on {topic} in {place}.
Write three paragraphs about the history of {topic}.
Write meeting notes for a team in {place} that discussed {topic}.
Write a product review related to {topic}, signed by {person}.
Write a letter from {person} in {place} about {topic}."""
)

SECOND_STAGE: Mapping[str, Sequence[str]] = {
    "summary": (
        "Summarize: {text}",
        "Summarize the following text in two sentences.\n\n{text}",
        "{text}\n\nTL;DR:",
        "Give the key points of this article as bullet points.\n\n{text}",
        "Write a headline and a one-paragraph summary for the article below.\n\n{text}",
    ),
    "reading": (
        "{text}\n\nWhat is the main idea of the text above?",
        "Use only this passage to answer. Passage: {text}\nQuestion: what does it say about time?",
        "{text}\n\nWho is mentioned in this text, and why?",
        "Answer the question using the documents.\n\nDocument 1: {text}\n\nQuestion: "
        "how is this connected with {topic}?",
        "{text}\nwhat is the most important fact here",
    ),
    "rewrite": (
        "Rewrite the following text in simpler words, keeping every fact.\n\n{text}",
        "Correct any mistakes in this text and return the full corrected text.\n\n{text}",
        "Make this text more formal. Return the whole text.\n\n{text}",
        "Turn this text into an email to a friend.\n\n{text}",
    ),
    "edit_text": (
        "Here is a document.\n\ndraft.md:\n```\n{text}\n```\n\nAdd a title line and return the "
        "complete file in a code block.",
        "Here are the working documents.\n\nnotes.txt:\n```\n{text}\n```\n\nRemove the last "
        "paragraph and return the complete updated file.",
        "Return this document with numbered paragraphs, otherwise unchanged:\n\n{text}",
    ),
}

CODE_CONDITIONS = _words(
    """even|odd|negative|positive|a prime|greater than {num}|divisible by {num}|unique
a palindrome|a perfect square|at an even index|longer than {num} characters"""
)

CODE_TASKS = _words(
    """return the sum of all numbers in a list that are {cond}
count the words in a sentence that have more than {num} letters
find the longest common prefix of a list of strings
merge two sorted lists into one sorted list
check whether a string of brackets is balanced
rotate a list to the right by {num} places
flatten a nested list of integers
return the {num} most frequent words in a text
convert a Roman numeral to an integer
convert an integer to a string in base {num}
group a list of words by their first letter
remove duplicates from a list while keeping the order
compute the moving average of a list with a window of {num}
find all pairs in a list whose sum is {num}
transpose a matrix given as a list of lists
validate an email address with a regular expression
parse a line of comma separated values with quotes
compute the edit distance between two strings
implement binary search on a sorted list
return the n-th Fibonacci number with memoization
find the second largest element of a list
sort a list of dictionaries by a key
read a file and count its lines
compute the greatest common divisor of a list of numbers
encode a string with run-length encoding
decode a string that was run-length encoded
check whether two words are anagrams
find the first non-repeating character in a string
generate all permutations of a list
compute the area of a polygon from its vertices
count the islands in a grid of zeros and ones
find the shortest path in an unweighted graph
detect a cycle in a linked list
reverse the words of a sentence
format a number of seconds as hours, minutes and seconds
keep only the elements of a list where the index is {cond}
return the elements of a tuple that are {cond}
split a list into chunks of size {num}
compute the median of a list without sorting it in place
convert a temperature between Celsius and Fahrenheit
find the maximum product of {num} adjacent numbers
implement a stack with push, pop and minimum
implement a least recently used cache of size {num}
compute the power of a number by repeated squaring
return the intersection of {num} lists
replace every vowel in a string with a star
find the missing number in a list from 1 to n
sum the digits of a number until one digit is left
check if a number is {cond}
download a web page and return its title
write rows to a CSV file
retry a function up to {num} times with a delay"""
)

CODE_TEMPLATES = _lines(
    r"""Write a Python function to {task}.
Write a python function to {task}. Add type hints and a docstring.
Implement this in Python and add three test cases: {task}.
Write a JavaScript function to {task}.
Complete this Python function and return the whole function in a code block.\n\ndef solution(data):\n    {task}
Show me how to {task} in Python, then explain how it works.
Write a Java method to {task}.
Write a function to {task}. The code must pass these tests:\nassert callable(solution)
Write a class in Python with a method to {task}.
I need a short script to {task}. Keep it simple."""
)

MATHS = _lines(
    r"""{name} has {c} {item} and gives {a} of them to {friend}. Then {name} buys {b} packs of {d} {item}. How many {item} does {name} have now?
A shop sells {item} for ${a} each and {other} for ${b} each. {name} buys {d} {item} and {b} {other}. How much does {name} pay in total?
{name} reads {a} pages a day for {b} days and then {d} pages a day for {a} days. How many pages did {name} read?
There are {c} students in a school club. {percent}% of them play chess. How many do not play chess?
{name} earns ${c} a day and spends ${a} of it on lunch. How much does {name} save in {b} weeks of five working days?
A train travels at {c} miles per hour for {b} hours and then at {a} miles per hour for {d} hours. How far does it go?
{friend} has {b} times as many {item} as {name}. Together they have {c} {item}. How many does each have?
A recipe needs {a} cups of flour for {b} people. How many cups are needed for {c} people?
{name} buys {c} {item} and finds that {percent}% are broken. How many are left after giving {d} to {friend}?
A garden is {c} feet long and {a} feet wide. A fence costs ${b} a foot. What does it cost to fence the garden?
{name} fills {a} boxes with {b} {item} each and has {d} left over. How many {item} were there?
The price of a lamp was ${c}. It was reduced by {percent}%, and {name} bought {d} of them. How much did {name} pay?
{name} runs {a} kilometers on Monday, twice as far on Tuesday, and {d} kilometers less than that on Wednesday. What is the total?
If {a} workers build a wall in {b} days, how long would {d} workers need?
What is {c} times {a} minus {b}? Show your steps.
{name} is {a} years old. {friend} is {b} times as old. How old will {friend} be in {d} years?
Each of {b} shelves holds {c} {item}. {name} removes {a} {item} from each shelf. How many are left?"""
)

TRANSLATE = _lines(
    r"""Translate {language} to English: {text}
Translate this {language} sentence into English: {text}
{language}: {text}\nEnglish:
What does this mean in English? "{text}"
Translate {language} to English: {text}
Please translate from {language} to English and keep the tone: {text}"""
)

SENTENCES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "German": {
        "who": [
            "der Bürgermeister",
            "die Lehrerin",
            "unser Nachbar",
            "die Regierung",
            "der Verein",
            "die Firma",
            "der Trainer",
            "die Polizei",
            "ein Sprecher des Ministeriums",
            "die junge Ärztin",
            "der Minister",
            "die Mannschaft",
            "das Gericht",
            "der Konzern",
            "die Stadtverwaltung",
            "eine Gruppe von Studenten",
        ],
        "verb": [
            "verkauft",
            "plant",
            "kritisiert",
            "besucht",
            "unterstützt",
            "erklärt",
            "verschiebt",
            "eröffnet",
            "prüft",
            "finanziert",
            "verhindert",
            "beschreibt",
            "fordert",
            "lobt",
        ],
        "what": [
            "den neuen Bahnhof",
            "das alte Haus",
            "ein großes Projekt",
            "die Ausstellung im Museum",
            "den Bau der Brücke",
            "die Entscheidung des Rates",
            "eine Studie über Energie",
            "den Vertrag mit dem Partner",
            "die Reform der Schulen",
            "das Spiel am Samstag",
            "die Suche nach einer Lösung",
            "den Bericht der Kommission",
        ],
        "when": [
            "am Montag",
            "seit drei Jahren",
            "im nächsten Sommer",
            "nach langen Verhandlungen",
            "heute",
            "vor der Wahl",
            "in der vergangenen Woche",
            "trotz aller Bedenken",
            "am frühen Morgen",
            "2014",
        ],
        "where": [
            "in Hamburg",
            "auf dem Markt",
            "in der Hauptstadt",
            "im Norden des Landes",
            "an der Grenze",
            "in vielen Städten",
            "vor dem Rathaus",
            "im Krankenhaus",
            "in den USA",
        ],
        "why": [
            "weil die Kosten gestiegen sind",
            "obwohl viele Menschen dagegen sind",
            "damit die Kinder sicher zur Schule kommen",
            "denn das Wetter war schlecht",
            "um mehr Arbeitsplätze zu schaffen",
            "da die Ergebnisse noch nicht vorliegen",
            "wenn alle Mitglieder zustimmen",
            "ohne die Bürger zu fragen",
        ],
        "patterns": (
            "{who} {verb} {what} {when} {where}.",
            "{when} {verb} {who} {what}, {why}.",
            "{where} {verb} {who} {what}.",
            "Wie {who} mitteilte, ist {what} {when} nicht mehr möglich.",
            "Es ist noch unklar, ob {who} {what} {where} {when} verkauft.",
            "„Wir brauchen mehr Zeit“, sagte {who} {when} {where}, {why}.",
            "{who} hat {when} {what} {where} vorgestellt.",
            "{who} {verb} {what}, {why}.",
        ),
    },
    "French": {
        "who": [
            "le maire",
            "la directrice",
            "notre voisin",
            "le gouvernement",
            "l'équipe",
            "une étudiante",
            "le médecin",
            "la société",
            "un porte-parole",
        ],
        "verb": [
            "présente",
            "refuse",
            "soutient",
            "critique",
            "visite",
            "prépare",
            "explique",
            "annonce",
        ],
        "what": [
            "le nouveau projet",
            "la réforme",
            "une exposition",
            "le budget de la ville",
            "un accord",
            "les résultats de l'enquête",
            "la construction du pont",
        ],
        "when": ["lundi", "depuis deux ans", "l'été prochain", "ce matin", "après la réunion"],
        "where": ["à Lyon", "dans la capitale", "au marché", "près de la gare", "dans le nord"],
        "patterns": (
            "{who} {verb} {what} {when} {where}.",
            "{when}, {who} {verb} {what}.",
            "selon la presse, {who} {verb} {what} {where}.",
        ),
    },
    "Spanish": {
        "who": [
            "el alcalde",
            "la profesora",
            "nuestro vecino",
            "el gobierno",
            "el equipo",
            "una médica",
            "la empresa",
            "un portavoz",
        ],
        "verb": _words("presenta|rechaza|apoya|critica|visita|prepara|explica|anuncia"),
        "what": [
            "el nuevo proyecto",
            "la reforma",
            "una exposición",
            "el presupuesto",
            "un acuerdo",
            "los resultados del estudio",
            "la construcción del puente",
        ],
        "when": ["el lunes", "desde hace dos años", "el próximo verano", "esta mañana", "hoy"],
        "where": ["en Valencia", "en la capital", "en el mercado", "cerca de la estación"],
        "patterns": (
            "{who} {verb} {what} {when} {where}.",
            "{when}, {who} {verb} {what}.",
            "según la prensa, {who} {verb} {what} {where}.",
        ),
    },
}

Columns = Sequence[tuple[str, str]]


def _columns(text: str) -> Columns:
    kinds = {"i": "INTEGER", "t": "TEXT", "r": "REAL", "d": "DATE"}
    pairs = (each.rsplit(":", 1) for each in text.split())
    return [(name, kinds[kind]) for name, kind in pairs]


DATABASES: Sequence[Mapping[str, Columns]] = (
    {
        "orders": _columns("order_id:i customer_id:i order_date:d total:r status:t"),
        "customers": _columns("customer_id:i name:t city:t email:t joined:d"),
        "order_items": _columns("item_id:i order_id:i product_id:i quantity:i price:r"),
        "products": _columns("product_id:i product_name:t category:t price:r stock:i"),
    },
    {
        "employees": _columns("emp_id:i name:t dept_id:i salary:r hired:d"),
        "departments": _columns("dept_id:i dept_name:t building:t budget:r"),
        "projects": _columns("project_id:i title:t dept_id:i start_date:d"),
    },
    {
        "students": _columns("student_id:i first_name:t last_name:t age:i major:t"),
        "courses": _columns("course_id:i title:t credits:i teacher:t"),
        "enrollments": _columns("enrollment_id:i student_id:i course_id:i grade:r"),
    },
    {
        "flights": _columns("flight_id:i airline_id:i origin:t destination:t distance:i"),
        "airlines": _columns("airline_id:i airline_name:t country:t"),
        "tickets": _columns("ticket_id:i flight_id:i passenger:t price:r seat:t"),
    },
    {
        "books": _columns("book_id:i title:t author_id:i year:i pages:i"),
        "authors": _columns("author_id:i name:t nationality:t born:i"),
        "loans": _columns("loan_id:i book_id:i member_id:i due_date:d"),
        "members": _columns("member_id:i name:t level:t"),
    },
    {
        "patients": _columns("patient_id:i name:t birth_date:d city:t"),
        "visits": _columns("visit_id:i patient_id:i doctor_id:i visit_date:d cost:r"),
        "doctors": _columns("doctor_id:i name:t specialty:t"),
    },
    {
        "stations": _columns("station_id:i name:t city:t docks:i"),
        "trips": _columns("trip_id:i start_station_id:i end_station_id:i duration:i bike_id:i"),
        "bikes": _columns("bike_id:i model:t purchase_year:i"),
    },
    {
        "songs": _columns("song_id:i title:t artist_id:i length:i rating:r"),
        "artists": _columns("artist_id:i name:t country:t debut_year:i"),
        "concerts": _columns("concert_id:i artist_id:i venue:t attendance:i"),
    },
    {
        "players": _columns("player_id:i name:t team_id:i goals:i height:r"),
        "teams": _columns("team_id:i team_name:t city:t founded:i"),
        "games": _columns("game_id:i home_team_id:i away_team_id:i home_score:i away_score:i"),
    },
    {
        "accounts": _columns("account_id:i owner:t balance:r opened:d"),
        "transfers": _columns("transfer_id:i from_account:i to_account:i amount:r made_on:d"),
    },
    {
        "recipes": _columns("recipe_id:i title:t minutes:i servings:i"),
        "ingredients": _columns("ingredient_id:i name:t unit:t"),
        "recipe_ingredients": _columns("recipe_id:i ingredient_id:i amount:r"),
    },
    {
        "hotels": _columns("hotel_id:i name:t city:t stars:i"),
        "rooms": _columns("room_id:i hotel_id:i kind:t price:r"),
        "bookings": _columns("booking_id:i room_id:i guest:t check_in:d nights:i"),
    },
)

SQL_QUESTIONS = _lines(
    r"""How many {table} are there?
List the {col} of all {table}.
What is the average {col} of all {table}?
Find the {col} and {col2} of {table} whose {col} is greater than {num}.
Which {table} have the highest {col}?
Show the number of {table} for each {col}.
Give the {col} of the {num} {table} with the lowest {col2}.
What are the different {col} of {table}, in alphabetical order?
Count the {table} whose {col} contains '{value}'.
For each {other}, show the total {col} of its {table}.
What is the maximum and minimum {col} of {table}?
Find the {col} of {table} that do not appear in {other}.
Return the {col} of {table} ordered by {col2} in descending order.
How many {table} have a {col} between {num} and 90?
Which {col} occur more than {num} times among {table}?
Show all details of {table} in {value}."""
)

SQL_TEMPLATES = _lines(
    r"""Database schema:\n{schema}\n\nWrite one SQL query that answers: {question} Answer with the SQL only.
{schema}\n\n{question}\nAnswer with a single SQL query.
Given these tables:\n\n{schema}\n\nWrite SQL for this question: {question}
You are a SQL expert. Schema:\n{schema}\nQuestion: {question}\nSQL:
Database schema:\n{schema}\n\nQuestion: {question}\nReturn only the SQL query."""
)

RECORDS = _words(
    """User|Product|Invoice|Event|Sensor|Address|Recipe|Ticket|Vehicle|Course|Order|Employee
Movie|Playlist|Booking|Configuration|Device|Report|Shipment|Patient|Review|Task"""
)

_STRING = {"type": "string"}
FIELDS: Sequence[tuple[str, Mapping[str, object]]] = (
    ("id", {"type": "integer"}),
    ("name", {"type": "string", "description": "The full name"}),
    ("email", {"type": "string", "format": "email"}),
    ("age", {"type": "integer", "minimum": 0}),
    ("tags", {"type": "array", "items": _STRING}),
    ("price", {"type": "number", "description": "The price in dollars"}),
    ("active", {"type": "boolean"}),
    ("created_at", {"type": "string", "format": "date-time"}),
    ("status", {"type": "string", "enum": ["open", "closed", "pending"]}),
    (
        "address",
        {
            "type": "object",
            "properties": {"street": _STRING, "city": _STRING, "zip": _STRING},
            "required": ["street", "city"],
        },
    ),
    ("quantity", {"type": "integer", "minimum": 1}),
    ("description", {"type": "string", "description": "A short description"}),
    ("ratings", {"type": "array", "items": {"type": "number"}}),
    ("color", {"type": "string", "enum": ["red", "green", "blue"]}),
    (
        "items",
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"sku": _STRING, "count": {"type": "integer"}},
            },
        },
    ),
    (
        "location",
        {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}},
    ),
    ("phone", {"type": "string", "pattern": "^[0-9-]+$"}),
    ("language", _STRING),
    ("duration_minutes", {"type": "integer"}),
    ("owner", {"type": "object", "properties": {"name": _STRING, "role": _STRING}}),
    ("enabled", {"type": "boolean", "default": True}),
    ("url", {"type": "string", "format": "uri"}),
)

JSON_TEMPLATES = _lines(
    r"""Produce one JSON object that is valid under this JSON schema. Answer with the JSON only.\n{schema}
Generate example data for this JSON schema:\n{schema}
Write a JSON array of {num} {record} objects with the fields {fields}.
Fill in this schema with realistic values and return only JSON.\n{schema}
Create a JSON object for a {record} with these keys: {fields}. No explanation.
Here is a JSON schema:\n{schema}\nGive a valid instance."""
)


@dataclass(frozen=True)
class Tool:
    """A function a model may call, and what people ask that needs it."""

    declaration: Mapping[str, object]
    queries: Sequence[str]


def _tool(name: str, about: str, fields: str, *queries: str) -> Tool:
    kinds = {"s": "string", "i": "integer", "f": "float", "b": "boolean", "a": "array"}
    properties = {}
    for each in fields.split():
        field, kind = each.split(":")
        what = f"The {field.replace('_', ' ')} to use."
        properties[field] = {"type": kinds[kind], "description": what}
    return Tool(
        {
            "name": name,
            "description": about,
            "parameters": {
                "type": "dict",
                "properties": properties,
                "required": list(properties)[:2],
            },
        },
        queries,
    )


TOOLS: Sequence[Tool] = (
    _tool(
        "get_weather",
        "Get the weather of a city.",
        "city:s date:s unit:s",
        "What will the weather be in {place} on {date}?",
        "Is it raining in {place} and {place2}?",
    ),
    _tool(
        "book_flight",
        "Book a flight.",
        "origin:s destination:s date:s passengers:i",
        "Book a flight from {place} to {place2} on {date} for {num} people.",
        "I want to fly from {place} to {place2}.",
    ),
    _tool(
        "convert_currency",
        "Convert an amount of money.",
        "amount:f from_currency:s to_currency:s",
        "How much is {num2} euros in dollars?",
        "Convert {num} dollars and {num2} dollars to yen.",
    ),
    _tool(
        "send_email",
        "Send an email.",
        "recipient:s subject:s body:s",
        "Send {name} an email about {topic}.",
        "Tell {name} that the meeting is on {date}.",
    ),
    _tool(
        "search_products",
        "Search the shop.",
        "query:s max_price:f in_stock:b",
        "Find {item} under {num} dollars.",
        "Do you have {item} in stock?",
    ),
    _tool(
        "get_order",
        "Look up an order.",
        "order_id:s include_items:b",
        "Where is my order {code}?",
        "My order {code} has not arrived. Can you check it?",
    ),
    _tool(
        "cancel_order",
        "Cancel an order.",
        "order_id:s reason:s",
        "Cancel order {code}, please.",
        "I no longer need {item}; cancel {code}.",
    ),
    _tool(
        "create_event",
        "Create a calendar event.",
        "title:s date:s duration_minutes:i guests:a",
        "Plan a meeting with {name} on {date} about {topic}.",
        "Add {topic} to my calendar for {date}.",
    ),
    _tool(
        "calculate_triangle_area",
        "Area of a triangle.",
        "base:f height:f unit:s",
        "What is the area of a triangle with base {num} and height {num2}?",
    ),
    _tool(
        "get_stock_price",
        "Price of a stock.",
        "ticker:s date:s",
        "What did the stock {code} cost on {date}?",
    ),
    _tool(
        "find_restaurants",
        "Find restaurants.",
        "city:s cuisine:s max_price:i",
        "Find a vegetarian restaurant in {place}.",
        "Where can I eat near {place} for under {num} dollars?",
    ),
    _tool(
        "translate_text",
        "Translate a text.",
        "text:s target_language:s",
        "Translate 'good morning, {name}' into French.",
        "How do you say {item} in Spanish?",
    ),
    _tool(
        "set_reminder",
        "Set a reminder.",
        "text:s time:s",
        "Remind me on {date} to buy {item}.",
        "Set a reminder about {topic} for {date}.",
    ),
    _tool(
        "distance_between",
        "Distance of two places.",
        "start:s end:s unit:s",
        "How far is it from {place} to {place2}?",
    ),
    _tool(
        "play_music",
        "Play music.",
        "artist:s playlist:s shuffle:b",
        "Play something by {name}.",
        "Put on music about {topic}.",
    ),
    _tool(
        "compound_interest",
        "Compute interest.",
        "principal:f rate:f years:i",
        "What are {num2} dollars worth after {num} years at 5 percent?",
    ),
    _tool(
        "get_user_details",
        "Details of a user.",
        "user_id:s",
        "My user id is {code}. Which address do you have?",
        "Look up {name}, id {code}.",
    ),
    _tool(
        "update_address",
        "Change an address.",
        "user_id:s street:s city:s zip_code:s",
        "I moved to {place}; please change my address. My id is {code}.",
    ),
    _tool(
        "transfer_to_human",
        "Hand over to a person.",
        "summary:s",
        "I want to talk to a person about {item}.",
        "This does not help. Let me speak to {name}.",
    ),
    _tool(
        "predict_growth",
        "Predict growth.",
        "initial:i rate:f periods:i",
        "A town has {num2} people and grows 3 percent a year. How many after {num} years?",
    ),
    _tool(
        "resize_image",
        "Resize an image.",
        "path:s width:i height:i",
        "Resize photo_{num}.png to {num2} pixels wide.",
    ),
    _tool(
        "list_files",
        "List files.",
        "folder:s pattern:s recursive:b",
        "Which csv files are in the folder {topic}?",
    ),
    _tool(
        "run_query",
        "Run a database query.",
        "sql:s limit:i",
        "Show me the first {num} customers in {place}.",
    ),
    _tool(
        "get_directions",
        "Directions.",
        "start:s destination:s mode:s",
        "How do I get from {place} to {place2} by bike?",
    ),
)

TOOL_SYSTEMS = _lines(
    r"""You can call these functions. Answer only with a JSON list of calls, each {{"name": ..., "arguments": {{...}}}}.\n{tools}
You have access to the following tools:\n{tools}\nReply with a JSON list of the calls to make.
Tools: {tools}\nFor each request answer with {{"name": <function>, "arguments": <object>}} and nothing else.
You are an assistant that answers with function calls. Available functions:\n{tools}"""
)

SHOPS = _words(
    "an online bookshop|an airline|a hotel chain|a phone company|a bank|a furniture store"
)

RULES = _lines(
    r"""Confirm the details and ask for an explicit yes before you change anything.
Make one tool call at a time, and do not answer in the same turn.
Refuse requests that these rules do not allow.
Never give out details of another user.
Orders can be cancelled within 24 hours of purchase.
Refunds go back to the original payment method within 7 days.
A delayed delivery is compensated with a certificate of $50.
Ask for the user id first.
Do not make up information that neither the user nor a tool has given.
Hand over to a person only if the request cannot be handled with the tools.
Members of the gold level may change a booking without a fee.
Each booking has at most five passengers.
All times are in the local time of the shop."""
)

AGENT_SYSTEM = """# Policy of {shop}

You help the customers of {shop}.

{rules}

# Tools
{tools}

To use a tool, answer with {{"name": ..., "arguments": {{...}}}} only."""

AGENT_ASKS = _lines(
    r"""Could you please give me your user id?
I can help with that. What is your order number?
Let me make sure I understood: you want to change the booking to {date}. Is that right?
Sure! For how many people, and on which day?
Thank you. May I ask for your full name?"""
)

AGENT_DONE = _lines(
    r"""I found your order {code}. It contains {num} {item} and was shipped to {place}.
Your request has been noted. Is there anything else I can do for you?
The fee for this change is ${num}. Do you want to go on (yes/no)?"""
)

USER_REPLIES = _lines(
    r"""My user id is {code}.
Yes, please go ahead.
It is order {code}, with {num} {item}.
No, I meant {place}, not {place2}.
My name is {name}.
On {date}, for {num} people.
Can you also send it to {place}?
That is too expensive. Is there something cheaper?
Thanks. What about my {item}?"""
)

PROJECTS = _words(
    "pathfinder|tinyqueue|formkit|gridpy|logtail|petstore-api|chartlet|cronwise|dbmigrate"
)
SYMBOLS = [
    "parse_date",
    "load_config",
    "retry",
    "to_json",
    "merge",
    "flush",
    "resolve",
    "validate",
    "render",
    "split_path",
]
CLASSES = _words("Scheduler|Client|Parser|Cache|Session|Router|Exporter|Field|Worker")

ISSUES = _lines(
    r"""`{symbol}` raises KeyError when the input is empty.\n\n```python\nfrom app import {symbol}\n{symbol}({{}})\n```\nExpected: an empty result.
{cls}.{symbol} returns the wrong value for numbers above {num}. It looks like a rounding error.
`{cls}` leaks a file handle: after {num} calls to `{symbol}` the process fails with "too many open files".
The timeout of `{cls}` is ignored. With `timeout={num}` the call to `{symbol}` never returns.
`{symbol}` does not accept a `pathlib.Path`; only strings work.
The docstring of `{cls}.{symbol}` says it returns a list, but it returns None."""
)

ISSUE_TEMPLATES = _lines(
    r"""An issue was reported in {project}:\n\n{issue}\n\nWrite a patch as a unified diff that fixes it.
Repository: {project}. Issue:\n{issue}\n\nExplain the cause and give the corrected code.
You are working in the shell of {project}. Issue: {issue}\nWhat is the first command you run, and why?
{issue}\n\nWrite a test that fails because of this bug in {project}."""
)

EDIT_TEMPLATES = _lines(
    r"""Here are the working documents.\n\n{name}:\n```\n{text}\n```\n\n{edit} Return the complete updated file.
{name}\n```\n{text}\n```\n{edit} Answer with the whole file in a code block.
I have this file called {name}:\n\n{text}\n\nPlease edit it: {edit} Show the full file.
Edit the file below. {edit}\n\n--- {name} ---\n{text}"""
)

Document = tuple[str, str, Sequence[str]]


def _csv_document(rng: random.Random) -> Document:
    header = "id,name,city,amount,status"
    rows = [
        f"{i},{rng.choice(NAMES)},{rng.choice(PLACES)},{rng.randrange(10, 900)},"
        f"{rng.choice(('open', 'closed', 'pending'))}"
        for i in range(1, rng.randrange(6, 16))
    ]
    edits = (
        f"Change the status of row {rng.randrange(1, 6)} to closed.",
        f"Add a row for {rng.choice(NAMES)} from {rng.choice(PLACES)}.",
        "Sort the rows by amount.",
        "Remove the city column.",
        "Add a column country with the right values.",
    )
    return "accounts.csv", "\n".join([header, *rows]), edits


def _config_document(rng: random.Random) -> Document:
    port = rng.randrange(3000, 9000)
    text = "\n".join(
        [
            "server:",
            "  host: 0.0.0.0",
            f"  port: {port}",
            f"  workers: {rng.randrange(1, 16)}",
            "logging:",
            f"  level: {rng.choice(('debug', 'info', 'warning'))}",
            "  file: app.log",
            "database:",
            f"  name: {rng.choice(RECORDS).lower()}s",
            f"  pool_size: {rng.randrange(2, 40)}",
            "features:",
            *[f"  - {each.lower()}_export" for each in rng.sample(RECORDS, 4)],
        ]
    )
    edits = (
        f"Set the port to {rng.randrange(3000, 9000)}.",
        "Change the log level to error.",
        "Add a cache section with a size of 512 and a ttl of 60.",
        "Remove the features section.",
        "Rename the database to archive.",
    )
    return "config.yaml", text, edits


def _code_document(rng: random.Random) -> Document:
    record = rng.choice(RECORDS)
    fields = rng.sample(("name", "size", "owner", "price", "count", "label", "weight", "level"), 4)
    lines = [f"class {record}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields:
        lines += ["", f"    def get_{field}(self):", f"        return self.{field}"]
    lines += [
        "",
        f"    def set_{fields[0]}(self, {fields[0]}):",
        f"        self.{fields[0]} = {fields[0]}",
    ]
    edits = (
        f"Rename the class {record} to {record}Item.",
        "Add a __repr__ method.",
        "Add docstrings to every method.",
        f"Add an attribute color with a default of None, after {fields[-1]}.",
        "Turn the getters into properties.",
        f"Remove the method get_{fields[1]}.",
    )
    return f"{record.lower()}.py", "\n".join(lines), edits


def _list_document(rng: random.Random) -> Document:
    lines = [f"# Plan for {rng.choice(TOPICS)}", ""]
    for number in range(1, rng.randrange(5, 10)):
        lines.append(
            f"{number}. {rng.choice(NAMES)} prepares {rng.choice(TOPICS)} for {rng.choice(PLACES)} "
            f"({rng.randrange(1, 30)} hours)"
        )
    edits = (
        "Double the hours of every step.",
        "Add a final step about cleaning up.",
        "Turn the numbered list into a markdown table.",
        "Delete step 2 and renumber the rest.",
        "Mark step 1 as done.",
    )
    return "plan.md", "\n".join(lines), edits


def _json_document(rng: random.Random) -> Document:
    rows = [
        {
            "id": i,
            "title": f"{rng.choice(RECORDS)} {i}",
            "city": rng.choice(PLACES),
            "price": rng.randrange(5, 400),
            "tags": rng.sample(TONES, 2),
        }
        for i in range(1, rng.randrange(3, 6))
    ]
    edits = (
        "Add a key available with the value true to every object.",
        "Change the price of the first object to 99.",
        "Remove the tags.",
        f"Add an object for {rng.choice(PLACES)}.",
    )
    return "items.json", json.dumps(rows, indent=2), edits


DOCUMENTS: Sequence[Callable[[random.Random], Document]] = (
    _csv_document,
    _config_document,
    _code_document,
    _list_document,
    _json_document,
)
