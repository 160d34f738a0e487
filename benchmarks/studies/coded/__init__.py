"""Coded transforms: self-review on tasks where first attempts almost never succeed.

    python -m benchmarks.studies.coded

A tiny transformer answers `F47291=`: each class letter has a hidden true rule, and on rare classes
the policy starts out sure of a wrong one. Feedback names the family of the true rule, a review
names a rule, a second attempt follows the review, and its success is distilled into the first
attempt. Advantages, objectives, gate, credit, distillation, picks and corrections are those of
`rrl_core`; the environment, the policy and the arms are here. Every run is a run of a log of
`storage`, so that its views answer questions about the study (`journal`).

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
8. A problem hardly ever comes up twice, so a state is judged by what became of the same rule,
   stated for the same class, on other problems (`values`); a rule that no other states counts as
   0.25, like a prompt that was never tried. States are cut by `rrl_core.value.cuts`, which halves
   such answers; the cut at the token that fell most, for which all successes would be scored again
   by today's policy, is left out. A judgement is as new as the iteration. `stale` arms keep the one
   that an entry got when it was made, also for what is eligible.
9. What replay gives back is counted in the budget: continuations, retries, the fresh rest of the
   group that a trajectory joins.
10. Variety and forgetting are of 40 rare and 20 common held-out problems with 16 samples each, at
   the start, in the middle and at the end. Lost is a problem that was solved and then fails 16
   times of 16, as in the product; training meets too few problems again to see that. pass@k,
   distinct answers and the entropy are of the rare ones.

What it cannot show: anything at the scale of language models. It has 16 classes, one decision that
matters, and a memory that knows the class of a problem.
"""
