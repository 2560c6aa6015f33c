"""Registry entries of the studies; importing this module does not import JAX."""

from apportion.studies.registry import StudyEntry

FIG1 = StudyEntry(
    "apportion_studies.theory.fig1:fig1",
    "LSPI on the synthetic problem: real against permuted examples",
    cost=1,
    on_processor=True,
)
FIG2 = StudyEntry(
    "apportion_studies.portfolio.fig2:fig2",
    "what a task's score says about its gradient and its progress",
    cost=7,
)
FIG3_4 = StudyEntry(
    "apportion_studies.portfolio.fig3_4:fig3_4",
    "single-task, multi-task and prioritised learning: curves, and held-out instruments",
    figures=("fig3", "fig4", "protocols"),
    cost=12,
)
LITERAL = StudyEntry(
    "apportion_studies.portfolio.literal:literal",
    "five departures from Algorithm 1 put back, and each value that the paper leaves open",
    figures=("literal", "omitted"),
    cost=8,
)
FIG5 = StudyEntry(
    "apportion_studies.portfolio.fig5:fig5",
    "allocations and wealth over the last year",
    cost=10,
)
MECHANISMS = StudyEntry(
    "apportion_studies.portfolio.mechanisms:mechanisms",
    "gains in the days learned from and after them, and what priorities do to the spread over seeds",
    figures=("generalisation", "stability"),
    cost=9,
)
CHARGING = StudyEntry(
    "apportion_studies.charging.charging:charging",
    "one policy for every garage beside every scheduler, on real charging sessions",
    figures=("garages", "objectives"),
    cost=11,
)
FIG6 = StudyEntry(
    "apportion_studies.federated.fig6:fig6",
    "learned aggregation in a federation",
    cost=13,
)
FEDERATIONS = StudyEntry(
    "apportion_studies.federated.federations:federations",
    "one policy in every kind of federation, beside every other way to aggregate",
    cost=10,
)
BOUND = StudyEntry(
    "apportion_studies.theory.bound:bound",
    "both theorems against measured suboptimality, with all features and with few",
    figures=("bound", "approximation"),
    on_processor=True,
)
CROSSOVER = StudyEntry(
    "apportion_studies.theory.crossover:crossover",
    "when multi-task learning stops paying as tasks drift apart, and how fast more tasks help",
    figures=("crossover", "corollary1"),
    cost=2,
    on_processor=True,
)
COROLLARY2 = StudyEntry(
    "apportion_studies.theory.corollary2:corollary2",
    "what all orderings and all subsets of the entities are worth",
    cost=3,
    on_processor=True,
)
EQUIVARIANCE = StudyEntry(
    "apportion_studies.theory.equivariance:equivariance",
    "a network shared by all entities against a plain one of as many parameters",
    on_processor=True,
)
RECIPE = StudyEntry(
    "apportion_studies.portfolio.recipe:recipe",
    "a practical policy, walked forward over years beside lazy Equal CRP",
    cost=6,
)
PRIORITISATION = StudyEntry(
    "apportion_studies.portfolio.prioritisation:prioritisation",
    "where drawing tasks by priority pays, and whom it serves if tasks conflict",
    figures=("prioritisation", "conflict"),
    cost=4,
)
