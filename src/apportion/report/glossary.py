"""What the words on a run's page mean."""

WORDS = {
    "allocation": "How a period's whole is shared out: one share for each entity; shares sum to 1.",
    "deviation from equal shares": (
        "A share less 1 divided by the number of entities. Equal shares know nothing; a policy that "
        "stays near them has learned little, or trusts it little."
    ),
    "task": "A subset of all entities; the policy learns from many of them.",
    "score and probability": (
        "A task's score says how much there was to learn from it; its probability to be drawn next "
        "grows with the score."
    ),
    "STL, MTL, P-MTL": "Learning from one task, from many drawn evenly, from many drawn by priority.",
    "Equal CRP": "Equal shares, restored every day (a constantly rebalanced portfolio).",
    "lazy-crp": "Equal shares, restored a tenth of the way each day; it learns nothing and trades little.",
    "hindsight": "Chosen when all was known, such as the best constant shares; nobody could hold it.",
    "in-sample": "Days that the policy was trained on; they say nothing about days to come.",
    "drawdown": "How far a value lies below its own highest value so far.",
    "turnover": "The sum of all changes of shares in a period; 2 sells everything and buys other things.",
    "Sharpe ratio": "Mean return over its standard deviation, a year.",
    "interval": "95 %: made anew from new data, 19 of 20 such intervals hold the truth.",
    "holds, does not hold, not established": (
        "The interval lies on the claim's side of 0; on the other side; around 0, which says nothing "
        "either way."
    ),
    "k, eta": (
        "How far the learned policy is trusted (0: equal shares), and which part of the way is traded "
        "each day."
    ),
    "certificate": "A verdict on the policy against what decides today, by bets on its gains.",
}
