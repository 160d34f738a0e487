"""Leak corpus: problem, gold, review, and what the review gives away."""

ADD = "What is 3 + 4?"
EGGS = "Ducks lay 16 eggs a day. Janet eats 3 and bakes with 4. She sells the rest at $2. Income?"
WORDS = "Which city is the capital of France?"

# name -> (problem, gold, review, stratum)
CASES = {
    # nothing is told
    "advice": (ADD, "7", "Wrong: the sum is off\nInstead: add again", "none"),
    "numbers of the problem": (ADD, "7", "Wrong: you added 4 twice\nInstead: add 3 and 4", "none"),
    "quotes the wrong sum": (ADD, "7", "Wrong: 3 + 4 = 8 is false\nInstead: add again", "none"),
    "quotes at a line's end": (ADD, "7", "Wrong: you wrote 3 + 4 = 8\nInstead: add again", "none"),
    "your answer": (ADD, "7", "Wrong: your answer is 8\nInstead: add again", "none"),
    "not this": (ADD, "7", "Wrong: the answer is not 8\nInstead: add again", "none"),
    "gold in the problem": ("Write 7 in words, then 7.", "7", "Instead: write 7 first", "none"),
    "no gold": (ADD, None, "Wrong: 7 is right\nInstead: keep it", "none"),
    "empty": (ADD, "7", "", "none"),
    "part of a number": (ADD, "7", "Wrong: 17 or 70 or 7.5 is too much", "none"),
    "part of a word": (ADD, "7", "Wrong: m7 and x7 are no numbers", "none"),
    "the answer is a word": (ADD, "7", "Wrong: the answer is off\nInstead: count", "none"),
    # an answer, but not the gold
    "marker": (ADD, "7", "Wrong: careless\n#### 8", "answer"),
    "box": (ADD, "7", "Instead: \\boxed{8}", "answer"),
    "box cut off": (ADD, "7", "Instead: \\boxed{8", "answer"),
    "answer is": (ADD, "7", "Wrong: no\nInstead: the answer is 8", "answer"),
    "answer is zero": (ADD, "7", "Instead: the answer is 0", "answer"),
    "answer, bold": (ADD, "7", "Instead: the correct answer is: **8**", "answer"),
    "should be": (ADD, "7", "Instead: the result should be -8.", "answer"),
    "equation at the end": (ADD, "7", "Wrong: no\nInstead: compute 3 + 4 = 8", "answer"),
    "equation with a unit": (EGGS, "18", "Wrong: no\nInstead: 9 * 2 = 20 dollars.", "answer"),
    "marked word": (WORDS, "Paris", "Wrong: no\n#### Rome", "answer"),
    "answer without gold": (ADD, None, "Instead: the answer is 8", "answer"),
    # the gold
    "marker of gold": (ADD, "7", "Wrong: careless\n#### 7", "gold"),
    "earlier marker": (ADD, "7", "#### 7 or else #### 8", "gold"),
    "box of gold": (ADD, "7", "Instead: \\boxed{7}", "gold"),
    "nested box": (ADD, "7", "Instead: \\boxed{\\text{about } \\boxed{7}} or \\boxed{8}", "gold"),
    "equal numbers": (ADD, "0.75", "Instead: the answer is \\boxed{\\frac{3}{4}}", "gold"),
    "thousands": (EGGS, "1200", "Instead: the answer is $1,200.", "gold"),
    "gold equation above": (ADD, "7", "Wrong: 3 + 4 = 7\nInstead: add again", "gold"),
    "gold in passing": (EGGS, "18", "Instead: you should get 18 from it", "gold"),
    "gold with a unit": (EGGS, "$18", "Instead: she makes 18 dollars", "gold"),
    "minus": ("What is 3 - 10?", "\u22127", "Instead: it is -7", "gold"),
    "stated though in the problem": ("Add 7 and 0.", "7", "Instead: the answer is 7", "gold"),
    "reference is a solution": (EGGS, "9 * 2 = 18\n#### 18", "Instead: get 18", "gold"),
    "word": (WORDS, "Paris", "Instead: name PARIS, please", "gold"),
    "marked letter": ("Is it A or B?", "B", "Wrong: b is meant\n#### B", "gold"),
}
