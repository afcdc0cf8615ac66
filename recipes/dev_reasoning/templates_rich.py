"""Golden-style problems of three or four calculations, and edge cases in the sentences of the ordinary templates."""

from recipes.dev_reasoning.shape import Draw, Problem, Template, compute, conclude, fact


def shop_trip(draw: Draw) -> Problem:
    (who,), (x, y) = draw.names(1), draw.things(2)
    a, b, c, d = (draw.between(2, 5) for _ in range(4))
    first, second = a * b, c * d
    cost = first + second
    paid = 10 * ((cost + 1) // 10 + draw.between(1, 3))
    return Problem(
        operands=(a, b, c, d, paid),
        prompt=f"{who} buys {a} {x} for {b} dollars each and {c} {y} for {d} dollars each "
        f"and pays with {paid} dollars. How many dollars does {who} get back?",
        steps=(
            compute(f"{a} * {b} = {first} and {c} * {d} = {second}"),
            compute(f"{first} + {second} = {cost}"),
            compute(f"{paid} - {cost} = {paid - cost}"),
            conclude(f"So {who} gets {paid - cost} dollars back."),
        ),
        answer=str(paid - cost),
    )


def school_trip(draw: Draw) -> Problem:
    seats, cars, classes = draw.between(4, 9), draw.between(4, 12), draw.between(2, 6)
    people = seats * cars
    teachers = people % classes + classes
    children = (people - teachers) // classes
    return Problem(
        operands=(classes, children, teachers, seats),
        prompt=f"{classes} classes with {children} children each and {teachers} teachers go on a trip. "
        f"Each car takes {seats} people. How many cars do they need?",
        steps=(
            compute(f"{classes} * {children} = {classes * children}"),
            compute(f"{classes * children} + {teachers} = {people}"),
            compute(f"{people} / {seats} = {cars}"),
            conclude(f"So they need {cars} cars."),
        ),
        answer=str(cars),
    )


def garden_rows(draw: Draw) -> Problem:
    (who,) = draw.names(1)
    (a, b), (c, d), gone = draw.factors(), draw.factors(), draw.between(2, 6)
    first, second = a * b, c * d
    total = first + second
    return Problem(
        operands=(a, b, c, d, gone),
        prompt=f"{who} plants {a} rows of {b} roses and {c} rows of {d} beans. {gone} plants dry up. "
        f"How many plants are left?",
        steps=(
            compute(f"{a} * {b} = {first} and {c} * {d} = {second}"),
            compute(f"{first} + {second} = {total}"),
            compute(f"{total} - {gone} = {total - gone}"),
            conclude(f"So {total - gone} plants are left."),
        ),
        answer=str(total - gone),
    )


def savings_plan(draw: Draw) -> Problem:
    (who,), start, (a, b), spent = draw.names(1), draw.between(2, 20), draw.factors(), draw.between(2, 9)
    saved = a * b
    total = saved + start
    spent = min(spent, total - 2)
    return Problem(
        operands=(start, a, b, spent),
        prompt=f"{who} has {start} dollars and saves {a} dollars each week for {b} weeks. "
        f"Then {who} pays {spent} dollars for a gift. How many dollars are left?",
        steps=(
            compute(f"{a} * {b} = {saved}"),
            compute(f"{saved} + {start} = {total}"),
            compute(f"{total} - {spent} = {total - spent}"),
            conclude(f"So {total - spent} dollars are left."),
        ),
        answer=str(total - spent),
    )


def bus_ride(draw: Draw) -> Problem:
    people, off, on, last = draw.between(21, 80), draw.between(2, 9), draw.between(2, 12), draw.between(2, 9)
    after_off, after_on = people - off, people - off + on
    return Problem(
        operands=(people, off, on, last),
        prompt=f"{people} people are on a bus. {off} people get off and {on} people get on. "
        f"Then {last} people get off. How many people are left?",
        steps=(
            compute(f"{people} - {off} = {after_off}"),
            compute(f"{after_off} + {on} = {after_on}"),
            compute(f"{after_on} - {last} = {after_on - last}"),
            conclude(f"So {after_on - last} people are left."),
        ),
        answer=str(after_on - last),
    )


def zero_left(draw: Draw) -> Problem:
    (who, friend), (thing,), a, b = draw.names(2), draw.things(1), draw.between(4, 60), draw.between(11, 40)
    return Problem(
        operands=(a, b),
        prompt=f"{who} has {a} {thing}. {who} gives {a} {thing} to {friend} and then buys {b} more {thing}. "
        f"How many {thing} does {who} have now?",
        steps=(
            fact("We take away, then we add."),
            compute(f"{a} - {a} = 0"),
            compute(f"0 + {b} = {b}"),
            conclude(f"So {who} has {b} {thing}."),
        ),
        answer=str(b),
    )


def times_one(draw: Draw) -> Problem:
    (who,), (thing,), a = draw.names(1), draw.things(1), draw.between(2, 60)
    return Problem(
        operands=(a, 1),
        prompt=f"{who} buys {a} {thing} for 1 dollar each. How many dollars does {who} pay?",
        steps=(fact("We multiply."), compute(f"{a} * 1 = {a}"), conclude(f"So {who} pays {a} dollars.")),
        answer=str(a),
    )


def times_zero(draw: Draw) -> Problem:
    (thing,), holder, a, b = draw.things(1), draw.holder(), draw.between(2, 12), draw.between(2, 60)
    return Problem(
        operands=(a, 0, b),
        prompt=f"There are {a} {holder} with 0 {thing} in each and {b} {thing} on the table. "
        f"How many {thing} are there in all?",
        steps=(
            fact("We multiply, then we add."),
            compute(f"{a} * 0 = 0"),
            compute(f"0 + {b} = {b}"),
            conclude(f"So there are {b} {thing}."),
        ),
        answer=str(b),
    )


def equal_numbers(draw: Draw) -> Problem:
    (x, y, z), (thing,), a = draw.names(3), draw.things(1), draw.between(2, 33)
    return Problem(
        operands=(a, a, a),
        prompt=f"{x} has {a} {thing}, {y} has {a} {thing} and {z} has {a} {thing}. How many {thing} are there in all?",
        steps=(
            fact("We add, then we add."),
            compute(f"{a} + {a} = {a + a}"),
            compute(f"{a + a} + {a} = {a * 3}"),
            conclude(f"So there are {a * 3} {thing}."),
        ),
        answer=str(a * 3),
    )


def large_round(draw: Draw) -> Problem:
    (who,), (thing,) = draw.names(1), draw.things(1)
    a, b = 100 * draw.between(1, 9), 100 * draw.between(1, 9)
    verb = draw.pick("buys", "finds")
    return Problem(
        operands=(a, b),
        prompt=f"{who} has {a} {thing}. {who} {verb} {b} more {thing}. How many {thing} does {who} have now?",
        steps=(fact("We add."), compute(f"{a} + {b} = {a + b}"), conclude(f"So {who} has {a + b} {thing}.")),
        answer=str(a + b),
    )


def no_leftover(draw: Draw) -> Problem:
    (who,), (thing,), d, q = draw.names(1), draw.things(1), draw.between(6, 10), draw.between(2, 9)
    return Problem(
        operands=(d * q, d),
        prompt=f"{who} has {d * q} {thing} and fills bags with {d} {thing} in each. How many {thing} are left over?",
        steps=(fact("We divide."), compute(f"{d * q} = {d} * {q} + 0"), conclude(f"So 0 {thing} are left over.")),
        answer="0",
    )


def extra_number(draw: Draw) -> Problem:
    (who,), (thing, other), (a, b), c = draw.names(1), draw.things(2), draw.difference_pair(), draw.between(2, 20)
    return Problem(
        operands=(a, b, c),
        prompt=f"{who} has {a} {thing} and {c} {other}. {who} loses {b} {thing}. "
        f"How many {thing} does {who} have left?",
        steps=(
            fact(f"The {other} do not matter. We take away."),
            compute(f"{a} - {b} = {a - b}"),
            conclude(f"So {who} has {a - b} {thing}."),
        ),
        answer=str(a - b),
    )


GOLDEN = tuple(
    Template(
        build=build,
        category=category,
        difficulty="hard",
        section="golden",
        train=7,
        eval_section="trace",
        held_out=1,
    )
    for build, category in {
        shop_trip: "money",
        school_trip: "division",
        garden_rows: "multiplication",
        savings_plan: "money",
        bus_ride: "addition",
    }.items()
)

# template: (category, template whose sentences it borrows, training rows, held-out rows).
# The answer of no_leftover is always 0, so only one is held out.
_EDGE_ROWS = {
    zero_left: ("zero", "zero_left", 3, 2),
    times_one: ("one", "price_total", 3, 2),
    times_zero: ("zero", "mul_then_add", 3, 2),
    equal_numbers: ("equal", "add_three", 3, 3),
    large_round: ("large", "add_two", 3, 2),
    no_leftover: ("zero", "div_leftover", 2, 1),
    extra_number: ("distractor", "extra_number", 3, 3),
}

EDGE = tuple(
    Template(
        build=build,
        category=category,
        difficulty="medium",
        section="edge",
        train=train,
        eval_section="edge",
        held_out=held_out,
        wording=wording,
    )
    for build, (category, wording, train, held_out) in _EDGE_ROWS.items()
)
