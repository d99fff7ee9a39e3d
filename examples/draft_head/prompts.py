"""Prompts to train a draft head with: tasks times subjects, as people ask a small assistant. One line of JSON each.

python examples/draft_head/prompts.py > prompts.jsonl
emberline draft train MODEL --text prompts.jsonl --held-out examples/draft_head/held_out.txt --out head
"""

import json
import random
import sys

SUBJECTS = (
    """
the water cycle|photosynthesis|black holes|the French Revolution|supply and demand|recursion|binary search|hash tables
plate tectonics|vaccines|the immune system|how bread rises|sourdough|coffee roasting|chess openings|the Silk Road
jazz|impressionism|haiku|the Roman Empire|the printing press|electric cars|solar panels|wind turbines|nuclear fusion
climate change|coral reefs|honeybees|migration of birds|whales|volcanoes|earthquakes|glaciers|the Moon|Mars|comets
the stock market|compound interest|inflation|budgeting|credit cards|mortgages|retirement savings|taxes for freelancers
job interviews|writing a CV|public speaking|negotiating a salary|remote work|time management|procrastination|teamwork
learning a language|learning the guitar|running a marathon|yoga|strength training|healthy sleep|stress|meditation
vegetarian cooking|pasta sauces|knife skills|meal planning|gardening|composting|houseplants|dog training|cat behavior
camping|hiking boots|packing for a long trip|visiting Japan|visiting Iceland|train travel|photography|film cameras
version control with git|unit testing|code review|debugging|SQL joins|regular expressions|Python decorators
Python dictionaries|list comprehensions|JavaScript promises|CSS flexbox|HTML forms|REST APIs|HTTP status codes|Docker
Linux file permissions|shell scripts|sorting algorithms|linked lists|binary trees|dynamic programming|Big O notation
machine learning|neural networks|overfitting|decision trees|linear regression|statistics|probability|the normal curve
prime numbers|fractions|quadratic equations|the Pythagorean theorem|geometry proofs|derivatives|integrals|matrices
electric circuits|magnets|gravity|friction|light and color|sound waves|atoms|the periodic table|acids and bases|enzymes
DNA|evolution|cells|the human heart|the brain|memory|dreams|colds and flu|allergies|first aid|dental care|eye tests
democracy|constitutions|human rights|the United Nations|ancient Egypt|the Vikings|the Renaissance|World War II
the Cold War|space exploration|the internet|cryptography|passwords|phishing emails|social media|video games|board games
short stories|mystery novels|science fiction|fairy tales|poetry|essay structure|grammar|punctuation|persuasive writing
birthday parties|wedding speeches|thank-you notes|apology letters|small talk|friendship|moving house|buying a used car
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

TASKS = (
    """
Explain {} to a beginner.|Explain {} in one paragraph.|What is the most important thing to know about {}?
Give me five facts about {}.|List the pros and cons of {}.|Write a short story about {}.|Write a poem about {}.
Write a dialogue between two friends about {}.|What are common mistakes people make with {}?|Summarize {} in three
bullet points.|Why does {} matter?|How did {} change over time?|Give me a step-by-step guide to {}.
I am new to {}. Where should I start?|Write a quiz with three questions about {} and give the answers.
Compare {} with something similar.|What would an expert say about {}?|Write an introduction to an essay about {}.
Suggest three projects related to {}.|Write an email to a colleague about {}.|Teach me {} with an example.
What questions should I ask about {}?|Make a table of key terms about {}.|Tell me something surprising about {}.
How can I explain {} to a ten-year-old?|Write a blog post about {}.|Give advice to someone who struggles with {}.
Describe {} as if you were a journalist.|What is the history of {}?|Rewrite this more formally: "{} is kind of neat."
Write a tweet about {}.|Plan a one-hour lesson about {}.|What are the basic terms of {}?|Write a checklist for {}.
Is {} difficult? Why?|What tools do I need for {}?|Write a product description related to {}.
Translate the idea of {} into everyday language.|Write JSON with three fields that describe {}.
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
CODE = (
    """
Write a Python function that {}.|Write a JavaScript function that {}.|Write a SQL query that {}.
Write a shell command that {}.|Show me an example in Python that {}. Explain it.|Write a unit test for code that {}.
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
GOALS = (
    """
reverses a string|counts the words of a text|finds the largest number of a list|removes duplicates|sorts by two keys
reads a CSV file|writes JSON to a file|checks whether a number is prime|computes Fibonacci numbers|merges two lists
finds files larger than 1 MB|renames all files in a folder|parses a date|validates an email address|groups by month
joins two tables|counts rows per customer|finds the second highest value|flattens a nested list|caches results
retries after an error|measures how long something takes|splits a list into chunks|compares two dictionaries
converts Celsius to Fahrenheit|computes the average|draws a histogram|downloads a page|prints a multiplication table
finds anagrams|checks balanced parentheses|rotates a matrix|searches a sorted list|builds a binary tree|shuffles cards
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def prompts() -> list[str]:
    asked = [task.format(subject) for task in TASKS if "{}" in task for subject in SUBJECTS]
    asked += [task.format(goal) for task in CODE for goal in GOALS]
    return asked


def main() -> None:
    asked = prompts()
    random.Random(0).shuffle(asked)
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else len(asked)
    for prompt in asked[:limit]:
        print(json.dumps({"prompt": prompt}))


if __name__ == "__main__":
    main()
