# SPDX-License-Identifier: Apache-2.0
"""Makes up data in the form of the Rossmann Store Sales competition, for keras_spark_rossmann.py.

Seven CSV files with the columns of the real ones: daily sales of stores from 2013 to July 2015
(train.csv), the six weeks after it (test.csv), the stores, the states they are in, the weather
there, and how much people searched for the shop. What is sold depends on the store, the promotion,
the day and the month, so there is something to learn. The same seed makes the same files.

    python examples/make_rossmann_data.py FOLDER [--stores 40] [--seed 1]
"""
import argparse
import csv
import datetime
import math
import os
import random

FIRST_DAY = datetime.date(2013, 1, 1)
LAST_TRAIN_DAY = datetime.date(2015, 7, 31)
LAST_TEST_DAY = datetime.date(2015, 9, 17)
FIRST_TREND_DAY = datetime.date(2012, 12, 2)
LAST_TREND_DAY = datetime.date(2015, 9, 27)
ONE_DAY = datetime.timedelta(days=1)

# Stores of Bremen and Lower Saxony are counted together, under the name of the latter.
STATES = {"BadenWuerttemberg": "BW", "Bayern": "BY", "Berlin": "BE", "Hamburg": "HH",
          "Hessen": "HE", "Niedersachsen": "HB,NI", "NordrheinWestfalen": "NW",
          "RheinlandPfalz": "RP", "Sachsen": "SN", "SachsenAnhalt": "ST",
          "SchleswigHolstein": "SH", "Thueringen": "TH"}
PROMO_INTERVALS = ("Jan,Apr,Jul,Oct", "Feb,May,Aug,Nov", "Mar,Jun,Sept,Dec")
HOLIDAYS = {(1, 1): "a", (5, 1): "a", (10, 3): "a", (12, 25): "c", (12, 26): "c"}
EASTER_MONDAYS = {2013: (4, 1), 2014: (4, 21), 2015: (4, 6)}
SCHOOL_HOLIDAYS = (((4, 1), (4, 14)), ((7, 15), (8, 28)), ((12, 22), (12, 31)))

WEATHER = ["Max_TemperatureC", "Mean_TemperatureC", "Min_TemperatureC", "Dew_PointC",
           "MeanDew_PointC", "Min_DewpointC", "Max_Humidity", "Mean_Humidity", "Min_Humidity",
           "Max_Sea_Level_PressurehPa", "Mean_Sea_Level_PressurehPa", "Min_Sea_Level_PressurehPa",
           "Max_VisibilityKm", "Mean_VisibilityKm", "Min_VisibilitykM", "Max_Wind_SpeedKm_h",
           "Mean_Wind_SpeedKm_h", "Max_Gust_SpeedKm_h", "Precipitationmm", "CloudCover", "Events",
           "WindDirDegrees"]
EVENTS = ("", "", "Rain", "Fog", "Snow", "Rain-Thunderstorm")


def days(first, last, step=ONE_DAY):
    while first <= last:
        yield first
        first += step


def state_holiday(day):
    easter = EASTER_MONDAYS[day.year]
    return "b" if (day.month, day.day) == easter else HOLIDAYS.get((day.month, day.day), "0")


def is_school_holiday(day):
    return any(first <= (day.month, day.day) <= last for first, last in SCHOOL_HOLIDAYS)


def is_promo(day):
    """Every second week, from Monday to Friday."""
    return day.toordinal() // 7 % 2 == 0 and day.isoweekday() <= 5


def make_stores(rng, n_stores):
    """Rows of store.csv, and what each store sells on a plain day."""
    rows, levels = [], {}
    for store in range(1, n_stores + 1):
        kind = rng.choices("abcd", (54, 2, 13, 31))[0]
        assortment = rng.choices("abc", (53, 1, 46))[0]
        has_rival = rng.random() < 0.68
        has_promo2 = rng.random() < 0.51
        rows.append([store, kind, assortment,
                     round(math.exp(rng.gauss(7.5, 1.2)), -1) if rng.random() < 0.99 else "",
                     rng.randint(1, 12) if has_rival else "",
                     rng.randint(2000, 2015) if has_rival else "", int(has_promo2),
                     rng.randint(1, 50) if has_promo2 else "",
                     rng.randint(2009, 2015) if has_promo2 else "",
                     rng.choice(PROMO_INTERVALS) if has_promo2 else ""])
        levels[store] = math.exp(rng.gauss(8.5, 0.35)) * (1.8 if kind == "b" else 1.0)
    return rows, levels


def sales_of(rng, level, day):
    expected = level * (1.38 if is_promo(day) else 1.0) * (1.25 if day.month == 12 else 1.0)
    return int(expected * (1.15 if day.isoweekday() == 1 else 1.0) * math.exp(rng.gauss(0, 0.06)))


def is_open(day):
    return day.isoweekday() != 7 and state_holiday(day) == "0"


def train_rows(rng, levels):
    """The newest day first, as in the real file."""
    for day in reversed(list(days(FIRST_DAY, LAST_TRAIN_DAY))):
        for store, level in levels.items():
            sales = sales_of(rng, level, day) if is_open(day) else 0
            yield [store, day.isoweekday(), day, sales, round(sales / 9.5), int(is_open(day)),
                   int(is_promo(day)), state_holiday(day), int(is_school_holiday(day))]


def test_rows(levels):
    """Three of four stores."""
    number = 0
    for day in reversed(list(days(LAST_TRAIN_DAY + ONE_DAY, LAST_TEST_DAY))):
        for store in levels:
            if store % 4 != 0:
                number += 1
                yield [number, store, day.isoweekday(), day, int(is_open(day)),
                       int(is_promo(day)), state_holiday(day), int(is_school_holiday(day))]


def trend_rows(rng):
    for state in ["DE"] + ["DE_" + short.split(",")[-1] for short in STATES.values()]:
        for day in days(FIRST_TREND_DAY, LAST_TREND_DAY, 7 * ONE_DAY):
            yield [f"Rossmann_{state}", f"{day} - {day + 6 * ONE_DAY}", rng.randint(45, 90)]


def weather_rows(rng):
    for state in STATES:
        for day in days(FIRST_DAY, LAST_TEST_DAY):
            mean = 10 - 10 * math.cos(2 * math.pi * day.timetuple().tm_yday / 365)
            mean = round(mean + rng.gauss(0, 3))
            wind, damp = rng.randint(5, 25), rng.randint(60, 85)
            yield [state, day, mean + 5, mean, mean - 5, mean - 2, mean - 4, mean - 6, damp + 12,
                   damp, damp - rng.randint(10, 30), 1020, 1015, 1010, 31, 15, 5, wind + 10, wind,
                   "" if rng.random() < 0.7 else wind + 25, round(max(rng.gauss(0, 2), 0), 2),
                   "" if rng.random() < 0.08 else rng.randint(0, 8), rng.choice(EVENTS),
                   rng.randint(-1, 360)]


def make(folder, n_stores=40, seed=1):
    rng = random.Random(seed)
    stores, levels = make_stores(rng, n_stores)
    states = list(STATES.values())
    sells = ["Open", "Promo", "StateHoliday", "SchoolHoliday"]
    files = {
        "train": (["Store", "DayOfWeek", "Date", "Sales", "Customers"] + sells,
                  train_rows(rng, levels)),
        "test": (["Id", "Store", "DayOfWeek", "Date"] + sells, test_rows(levels)),
        "store": (["Store", "StoreType", "Assortment", "CompetitionDistance",
                   "CompetitionOpenSinceMonth", "CompetitionOpenSinceYear", "Promo2",
                   "Promo2SinceWeek", "Promo2SinceYear", "PromoInterval"], stores),
        "store_states": (["Store", "State"], ([store, rng.choice(states)] for store in levels)),
        "state_names": (["StateName", "State"], STATES.items()),
        "googletrend": (["file", "week", "trend"], trend_rows(rng)),
        "weather": (["file", "Date"] + WEATHER, weather_rows(rng)),
    }
    os.makedirs(folder, exist_ok=True)
    for name, (head, rows) in files.items():
        with open(os.path.join(folder, f"{name}.csv"), "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("folder")
    options.add_argument("--stores", type=int, default=40)
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    make(args.folder, args.stores, args.seed)
    print(f"{args.stores} stores in {args.folder}")
