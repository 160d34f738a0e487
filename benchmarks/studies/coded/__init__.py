"""Coded transforms: self-review on tasks where first attempts almost never succeed.

    python -m benchmarks.studies.coded

A tiny transformer answers `F47291=`: each class letter has a hidden true rule, and on rare classes
the policy starts out sure of a wrong one. Feedback names the family of the true rule, a review
names a rule, a second attempt follows the review, and its success is distilled into the first
attempt. Advantages, objectives, gate, credit, distillation, picks and corrections are those of
`rrl_core`; the environment, the policy and the arms are here.

Our choices, where the design of the study leaves them open:
1. Classes A-F are common, G-P rare. A wrong rule is uniform among the other 11.
2. Positions in feedback are letters (Q-U for the digits, W for the end), so feedback never holds a
   digit. The corpus slips in 5 % of its answers, by one digit.
3. The shared trunk sees rules uniform for every class, and no world. Memories in the corpus are of
   the problem's class with a rule uniform among 12: reviews stay free of the mapping.
4. Held out are the digits that are 3 modulo 7 as a number; nothing is trained on them.
5. Of each problem with a failure the first failed attempt is reviewed R times, as in the product.
   R = 2 did no worse than 4 on two tuning seeds, and better than 8 and than one for each failure.
   Reviews and second attempts have advantages without the std. A malformed review is not punished,
   but stays out of memory.
6. Uninformative feedback is `w` and a family drawn at random. A random review names a rule drawn at
   random, and is not sampled. Both look like what the policy knows, and say nothing.
7. The last iteration may pass the budget by less than its own size; the table says what was used.

What it cannot show: anything at the scale of language models. It has 16 classes, one decision that
matters, and a memory that knows the class of a problem.
"""
