"""Safe road or idea: an environment with built-in forgetting, and the arms compared on it.

    python -m benchmarks.studies.forgetting

It isolates one claim: good ideas are seen early and pushed down before they can be finished, then
never sampled again; judging history by today's standard and replaying it recovers them. Picks,
annealing, A_pre and counts are those of `rrl_core.replay` and `rrl_core.value`, the weights of
given ideas and of old tokens those of `rrl_core.algorithms`.

Our choices, where the design of the environment leaves them open:
1. The shared logit b steps by the mean over the iteration's hard groups. With the sum, SAFE takes
   over so fast that a sixth of the right ideas is never seen: nothing is there to go back to.
2. A drill's class is uniform among the open ones; the value of a drill has no term of an idea.
3. m[x] is the mean of the prompt's last 16 own rewards, as in the product.
4. An arm may replay its newest four successes of a prompt as trajectories.
5. A replay group without a pick is a fresh group: every arm samples the same number of sequences,
   except that a replayed trajectory takes the place of one.

What it cannot show: anything at the scale of language models. It has one suppressed decision, a
known place of that decision, and a tabular policy. A KL term on that decision alone, tuned and
annealed, does as well in the end as replay does: whoever knows where the decision is can keep it
open.
"""
