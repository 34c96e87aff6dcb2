# SPDX-License-Identifier: Apache-2.0
"""Rossmann Store Sales from end to end: data, training and prediction in one Spark program.

1. Spark reads the CSV files of the competition, joins and completes them, and writes Parquet.
2. A Keras model with an embedding for each category is trained on all task slots by
   horovod.spark.run; each process reads its share of the rows. The best model is kept.
3. Spark predicts the sales asked for, with that model, into a submission file.

    wget http://files.fast.ai/part2/lesson14/rossmann.tgz
    tar zxvf rossmann.tgz
    python keras_spark_rossmann.py                        on the cores of this machine
    spark-submit --master URL keras_spark_rossmann.py     on a cluster

The competition is https://www.kaggle.com/c/rossmann-store-sales; the model is that of the article
https://www.fast.ai/2018/04/29/categorical-embeddings/. The CSV files are looked for in the current
folder, or in --data-dir; with --make-data files of the same form are made up and put there first.
On a cluster --data-dir and --work-dir are to be on a file system that all hosts have (URLs such as
hdfs://... will do). The same seed gives the same submission.
"""
import argparse
import csv
import datetime
import io
import math
import os
import random
import sys
import tempfile

import numpy as np
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

import horovod.spark

FILES = ["train", "test", "store", "store_states", "state_names", "googletrend", "weather"]
FLAGS = ["Open", "Promo", "StateHoliday", "SchoolHoliday"]
EVENTS = ["Promo", "StateHoliday", "SchoolHoliday"]
WEATHER = ["Max_TemperatureC", "Mean_TemperatureC", "Min_TemperatureC", "Max_Humidity",
           "Mean_Humidity", "Min_Humidity", "Max_Wind_SpeedKm_h", "Mean_Wind_SpeedKm_h",
           "CloudCover"]
CATEGORICAL = ["Store", "State", "DayOfWeek", "Year", "Month", "Day", "Week",
               "CompetitionMonthsOpen", "Promo2Weeks", "StoreType", "Assortment", "PromoInterval",
               "CompetitionOpenSinceYear", "Promo2SinceYear", "Events", "Promo", "StateHoliday",
               "SchoolHoliday"]
CONTINUOUS = ["CompetitionDistance", *WEATHER, "trend", "trend_de",
              *[f"{when}{event}" for event in EVENTS for when in ("Before", "After")]]
# What is not known about competitors and promotions began long ago.
LONG_AGO = {"CompetitionOpenSinceYear": "1900", "CompetitionOpenSinceMonth": "1",
            "Promo2SinceYear": "1900", "Promo2SinceWeek": "1"}


def session(args, name):
    """Which master it has is spark-submit's to say, or the configuration's, unless --master is."""
    builder = SparkSession.builder.appName(f"Rossmann: {name}")
    if args.master is not None:
        builder = builder.master(args.master)
    return (builder.config("spark.sql.shuffle.partitions", args.partitions)
            .config("spark.ui.showConsoleProgress", "false").getOrCreate())


# --- Part 1: data ------------------------------------------------------------------------------


def with_date(df, text="Date"):
    df = df.withColumn("Date", F.to_date(text))
    return (df.withColumn("Year", F.year("Date")).withColumn("Month", F.month("Date"))
            .withColumn("Week", F.weekofyear("Date")).withColumn("Day", F.dayofmonth("Date")))


def with_flags(df):
    """As booleans; a store that does not say whether it is open counts as open."""
    for name in FLAGS:
        df = df.withColumn(name, F.coalesce(F.col(name) != "0", F.lit(name == "Open")))
    return df


def trends(google):
    """How much was searched: by state, year and week, and for the whole country."""
    google = with_date(google.withColumn("first", F.split("week", " - ")[0]), "first")
    country = google.filter("file = 'Rossmann_DE'").select(
        "Year", "Week", F.col("trend").alias("trend_de"))
    state = F.regexp_extract("file", "^Rossmann_DE_(.+)$", 1)
    states = google.filter(state != "").select(
        F.when(state == "NI", "HB,NI").otherwise(state).alias("State"), "Year", "Week", "trend")
    return states, country


def with_facts(df, read):
    """The row's store, its state, what was searched for there and the weather."""
    stores = read("store").join(read("store_states"), "Store")
    states, country = trends(read("googletrend"))
    names = read("state_names")
    weather = (read("weather").withColumnRenamed("file", "StateName").join(names, "StateName")
               .select(F.to_date("Date").alias("Date"), "State", "Events", *WEATHER))
    return (df.join(stores, "Store").join(states, ["State", "Year", "Week"])
            .join(country, ["Year", "Week"]).join(weather, ["State", "Date"]))


def with_ages(df):
    """How long there has been a competitor nearby, and the long promotion."""
    df = df.fillna(LONG_AGO)
    for name in LONG_AGO:
        df = df.withColumn(name, F.col(name).cast("double").cast("int"))
    rival = F.make_date("CompetitionOpenSinceYear", "CompetitionOpenSinceMonth", F.lit(15))
    promo = F.date_add(F.make_date("Promo2SinceYear", F.lit(1), F.lit(1)),
                       (F.col("Promo2SinceWeek") - 1) * 7)
    rival_days = F.greatest(F.lit(0), F.least(F.lit(720), F.datediff("Date", rival)))
    promo_days = F.greatest(F.lit(0), F.least(F.lit(175), F.datediff("Date", promo)))
    return (df.withColumn("CompetitionMonthsOpen", F.floor(rival_days / 30).cast("int"))
            .withColumn("Promo2Weeks", F.floor(promo_days / 7).cast("int")))


def distances(df):
    """Days since the last and until the next event of each kind, by store and day."""
    by_day = Window.partitionBy("Store").orderBy("Date")
    past = by_day.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    future = by_day.rowsBetween(Window.currentRow, Window.unboundedFollowing)
    for event in EVENTS:
        day = F.when(F.col(event), F.col("Date"))
        last, following = F.last(day, True).over(past), F.first(day, True).over(future)
        df = (df.withColumn(f"After{event}", F.datediff("Date", last))
              .withColumn(f"Before{event}", F.datediff("Date", following)))
    return df.drop(*EVENTS)


def check_count(name, before, after):
    """The joins are to lose no row and to double none."""
    if before != after:
        raise ValueError(f"joining {name}.csv with the other files made {after} rows of {before}: "
                         "a store, state, week or day is missing in one of them, or there twice")


def vocabulary_of(df):
    """The sorted values of each category; a value that is missing counts as the empty one."""
    seen = df.select(*[F.collect_set(as_word(name)).alias(name) for name in CATEGORICAL]).head()
    return {name: sorted(seen[name]) for name in CATEGORICAL}


def as_word(name):
    return F.coalesce(F.col(name).cast("string"), F.lit(""))


def as_number(words):
    index = {word: number for number, word in enumerate(words)}
    return F.udf(lambda word: index[word], "int")


def with_numbers(df, vocabulary):
    """Categories as their place in the vocabulary, the others as floats; nothing is missing."""
    kept = [name for name in ("Id", "Date", "Sales", "Open") if name in df.columns]
    return df.select(
        *kept, *[as_number(vocabulary[name])(as_word(name)).alias(name) for name in CATEGORICAL],
        *[F.coalesce(F.expr(f"try_cast({name} as float)"), F.lit(0.0)).cast("float").alias(name)
          for name in CONTINUOUS])


def write(df, path, args):
    """In an order that does not depend on which task was faster."""
    (df.repartition(args.partitions, "Store").sortWithinPartitions("Store", "Date").drop("Date")
     .write.mode("overwrite").parquet(path))


def prepare(args, paths):
    """Writes the three sets; the vocabulary, the largest sales, and the error of a constant."""
    spark = session(args, "data preparation")

    def read(name):
        return spark.read.csv(f"{args.data_dir}/{name}.csv", header=True)

    sets = {name: with_flags(with_date(read(name))) for name in ("train", "test")}
    if args.sample_rate < 1.0:
        sets = {name: df.sample(False, args.sample_rate, args.seed) for name, df in sets.items()}
    around = distances(sets["train"].select("Store", "Date", *EVENTS)
                       .unionByName(sets["test"].select("Store", "Date", *EVENTS)))
    joined = {name: with_ages(with_facts(df, read)).join(around, ["Store", "Date"]).cache()
              for name, df in sets.items()}
    for name, df in sets.items():
        check_count(name, df.count(), joined[name].count())
    test = joined["test"].withColumn("Id", F.col("Id").cast("int"))
    train = joined["train"].withColumn("Sales", F.col("Sales").cast("float")).filter("Sales > 0")
    vocabulary = vocabulary_of(train.select(*CATEGORICAL).unionByName(test.select(*CATEGORICAL)))
    max_sales = float(train.select(F.max("Sales")).head()[0])

    year = datetime.timedelta(days=365)
    first, last = test.select(F.min("Date"), F.max("Date")).head()
    is_held = F.col("Date").between(first - year, last - year)
    train = with_numbers(train, vocabulary).cache()
    write(train.filter(~is_held), paths["train"], args)
    write(train.filter(is_held), paths["validation"], args)
    write(with_numbers(test, vocabulary), paths["test"], args)
    counts = {name: spark.read.parquet(path).count() for name, path in paths.items()}
    print(f"Rows: {counts}, categories: {sum(map(len, vocabulary.values()))}, "
          f"largest sales: {max_sales:g}")
    constant = constant_error(spark, paths)
    spark.stop()
    return vocabulary, max_sales, constant


def constant_error(spark, paths):
    """RMSPE of the one number that would have been best for all days of the training set."""
    sales = spark.read.parquet(paths["train"]).select((1 / F.col("Sales")).alias("r"))
    first, second = sales.select(F.sum("r"), F.sum(F.col("r") * F.col("r"))).head()
    error = F.avg(F.pow((F.col("Sales") - first / second) / F.col("Sales"), 2))
    return float(spark.read.parquet(paths["validation"]).select(error).head()[0]) ** 0.5


# --- Part 2: training --------------------------------------------------------------------------


def exp_rmspe():
    """The metric: root mean square percentage error of sales, from their logarithms.

    Made anew in each process, which is how Keras gets to know the class, to load it with a model.
    """
    import keras
    from keras import ops

    @keras.saving.register_keras_serializable("rossmann")
    class ExpRMSPE(keras.metrics.Metric):
        """Over all rows since the state was reset, not the mean of what batches have."""

        def __init__(self, name="exp_rmspe", **kwargs):
            super().__init__(name=name, **kwargs)
            self.squares = self.add_weight(name="squares", initializer="zeros")
            self.rows = self.add_weight(name="rows", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            sales = ops.exp(ops.cast(y_true, self.dtype))
            counts = ops.cast(sales > 0.001, self.dtype)
            if sample_weight is not None:
                counts *= ops.reshape(ops.cast(sample_weight, self.dtype), ops.shape(counts))
            share = (sales - ops.exp(ops.cast(y_pred, self.dtype))) / ops.maximum(sales, 0.001)
            self.squares.assign_add(ops.sum(counts * share * share))
            self.rows.assign_add(ops.sum(counts))

        def result(self):
            return ops.sqrt(self.squares / ops.maximum(self.rows, 1.0))

    return ExpRMSPE()


def build_model(vocabulary, max_sales, args):
    """36 inputs, embeddings of width 10, four layers; tells the logarithm of the sales."""
    import keras

    keras.utils.set_random_seed(args.seed)
    inputs = {name: keras.Input((1,), name=name, dtype="int32") for name in CATEGORICAL}
    inputs.update({name: keras.Input((1,), name=name) for name in CONTINUOUS})
    categories = [keras.layers.Flatten()(keras.layers.Embedding(len(vocabulary[name]), 10)(
        inputs[name])) for name in CATEGORICAL]
    numbers = keras.layers.Concatenate()([inputs[name] for name in CONTINUOUS])
    numbers = keras.layers.BatchNormalization(momentum=0.9)(numbers)
    x = keras.layers.Concatenate()([*categories, numbers])
    for width in args.layers:
        x = keras.layers.Dense(width, activation="relu",
                               kernel_regularizer=keras.regularizers.L2(0.00005))(x)
    x = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dropout(0.5)(x))
    outputs = keras.layers.Rescaling(1.2 * float(np.log(max_sales)))(x)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(args.learning_rate, epsilon=1e-3),
                  loss=keras.losses.MeanAbsoluteError(), metrics=[exp_rmspe()])
    model.optimizer.build(model.trainable_variables)  # so that it is saved as it is loaded
    return model


def suffix_of(path):
    """.keras, or .h5 for HDF5: Keras goes by the name."""
    suffix = os.path.splitext(path)[1]
    if suffix not in (".keras", ".h5", ".hdf5"):
        sys.exit(f"--checkpoint-file {path}: the name must end in .keras, or .h5 for HDF5")
    return suffix


def model_to_bytes(model, suffix):
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model{suffix}")
        return read_bytes(f"{folder}/model{suffix}")


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def load(data, suffix, load_model, **options):
    """A model from the bytes of its file, in either format."""
    exp_rmspe()
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/model{suffix}", "wb") as file:
            file.write(data)
        return load_model(f"{folder}/model{suffix}", **options)


def train_rank(model_bytes, paths, args):
    """What each process does. The first returns the history and the best model."""
    import keras
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd
    from horovod.spark.data import ParquetReader

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(args.seed + hvd.rank())

    def batches(path, shuffle):
        reader = ParquetReader(path, [*CATEGORICAL, *CONTINUOUS, "Sales"], args.batch_size,
                               hvd.rank(), hvd.size(), args.seed, shuffle)

        @tf.autograph.experimental.do_not_convert
        def split(batch):
            features = {name: tf.reshape(column, (-1, 1)) for name, column in batch.items()}
            return features, tf.math.log(features.pop("Sales"))

        return reader.tf_dataset().map(split), reader.steps_per_epoch

    suffix = suffix_of(args.checkpoint_file)
    model = load(model_bytes, suffix, hvd.load_model)
    with tempfile.TemporaryDirectory() as folder:
        rate = args.learning_rate * hvd.size()
        model.optimizer.learning_rate = rate
        train, train_steps = batches(paths["train"], True)
        validation, validation_steps = batches(paths["validation"], False)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(rate, args.warmup_epochs,
                                                     steps_per_epoch=train_steps),
            keras.callbacks.ReduceLROnPlateau("val_exp_rmspe", patience=10, mode="min"),
            keras.callbacks.EarlyStopping("val_exp_rmspe", patience=20, mode="min"),
            keras.callbacks.TerminateOnNaN()]
        best = f"{folder}/best{suffix}"
        if hvd.rank() == 0:
            callbacks.append(keras.callbacks.ModelCheckpoint(best, "val_exp_rmspe", mode="min",
                                                             save_best_only=True))
        history = model.fit(train, shuffle=False, epochs=args.epochs, steps_per_epoch=train_steps,
                            validation_data=validation, validation_steps=validation_steps,
                            callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)
        if hvd.rank() == 0:
            return history.history, read_bytes(best)


def train(args, paths, vocabulary, max_sales):
    model = build_model(vocabulary, max_sales, args)
    print(f"Parameters: {model.count_params()}")
    spark = session(args, "training")
    start = model_to_bytes(model, suffix_of(args.checkpoint_file))
    history, best = horovod.spark.run(train_rank, args=(start, paths, args),
                                      num_proc=args.num_proc)[0]
    spark.stop()
    with open(args.checkpoint_file, "wb") as file:
        file.write(best)
    return min(history["val_exp_rmspe"])


# --- Part 3: prediction ------------------------------------------------------------------------


def predict_rows(model_bytes, suffix, rows):
    """(Id, Sales) of the rows of a partition, many at a time. Who is closed sells nothing."""
    import itertools

    import keras

    model = load(model_bytes, suffix, keras.models.load_model, compile=False)
    while some := list(itertools.islice(rows, 1000)):
        features = {name: np.array([[row[name]] for row in some], dtype)
                    for names, dtype in ((CATEGORICAL, "int32"), (CONTINUOUS, "float32"))
                    for name in names}
        told = np.exp(np.asarray(model.predict_on_batch(features), dtype=np.float64).ravel())
        yield from ((row["Id"], float(sales) if row["Open"] else 0.0)
                    for row, sales in zip(some, told))


def predict(args, paths):
    spark = session(args, "prediction")
    best, suffix = read_bytes(args.checkpoint_file), suffix_of(args.checkpoint_file)
    test = spark.read.parquet(paths["test"]).coalesce(args.num_proc or args.partitions)
    told = test.rdd.mapPartitions(lambda rows: predict_rows(best, suffix, rows)).collect()
    spark.stop()
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["Id", "Sales"])
    lines.writerows((number, f"{sales:.2f}") for number, sales in sorted(told))
    with open(args.submission_file, "w", newline="") as file:
        file.write(text.getvalue())
    return len(told)


# --- With --make-data: files of the same form --------------------------------------------------
#
# Daily sales of stores from 2013 to July 2015 (train.csv), the six weeks after it (test.csv), the
# stores, the states they are in, the weather there, and how much people searched for the shop. What
# is sold depends on the store, the promotion, the day and the month, so there is something to
# learn. The same seed makes the same files.

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

ALL_WEATHER = ["Max_TemperatureC", "Mean_TemperatureC", "Min_TemperatureC", "Dew_PointC",
               "MeanDew_PointC", "Min_DewpointC", "Max_Humidity", "Mean_Humidity", "Min_Humidity",
               "Max_Sea_Level_PressurehPa", "Mean_Sea_Level_PressurehPa", "Min_Sea_Level_PressurehPa",
               "Max_VisibilityKm", "Mean_VisibilityKm", "Min_VisibilitykM", "Max_Wind_SpeedKm_h",
               "Mean_Wind_SpeedKm_h", "Max_Gust_SpeedKm_h", "Precipitationmm", "CloudCover", "Events",
               "WindDirDegrees"]
WEATHER_EVENTS = ("", "", "Rain", "Fog", "Snow", "Rain-Thunderstorm")


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
                   "" if rng.random() < 0.08 else rng.randint(0, 8), rng.choice(WEATHER_EVENTS),
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
        "weather": (["file", "Date"] + ALL_WEATHER, weather_rows(rng)),
    }
    os.makedirs(folder, exist_ok=True)
    for name, (head, rows) in files.items():
        with open(os.path.join(folder, f"{name}.csv"), "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)


# --- The program -------------------------------------------------------------------------------


def parse():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--master", help="of the Spark cluster; default: as Spark is configured")
    options.add_argument("--num-proc", type=int, help="processes; default: all task slots")
    options.add_argument("--data-dir", default=".", help="where the CSV files are")
    options.add_argument("--work-dir", default="rossmann_prepared", help="for Parquet files")
    options.add_argument("--checkpoint-file", default="rossmann_best.keras",
                         help="for the best model; .keras, or .h5 for HDF5")
    options.add_argument("--submission-file", default="submission.csv")
    options.add_argument("--make-data", action="store_true",
                         help="make up the CSV files and put them into --data-dir")
    options.add_argument("--stores", type=int, default=40, help="of --make-data")
    options.add_argument("--sample-rate", type=float, default=1.0, help="use a part of the rows")
    options.add_argument("--epochs", type=int, default=100)
    options.add_argument("--batch-size", type=int, default=100)
    options.add_argument("--learning-rate", type=float, default=1e-4)
    options.add_argument("--warmup-epochs", type=int, default=5)
    options.add_argument("--layers", type=int, nargs="+", default=[1000, 1000, 1000, 500])
    options.add_argument("--partitions", type=int, default=8, help="of Spark, when it shuffles")
    options.add_argument("--seed", type=int, default=1)
    return options.parse_args()


def find_data(args):
    """The folder of the CSV files, whole; made up only if that was asked for."""
    if "://" in args.data_dir:
        return args.data_dir
    folder = os.path.abspath(args.data_dir)
    if args.make_data:
        if os.path.exists(f"{folder}/train.csv"):
            sys.exit(f"{folder} has a train.csv, which --make-data would overwrite")
        make(folder, args.stores)
        print(f"Made up sales of {args.stores} stores in {folder}")
    missing = [name for name in FILES if not os.path.exists(f"{folder}/{name}.csv")]
    if missing:
        sys.exit(f"{folder} has no {', '.join(f'{name}.csv' for name in missing)}: unpack "
                 "http://files.fast.ai/part2/lesson14/rossmann.tgz there, name the folder that has "
                 "the files with --data-dir, or have data made up with --make-data")
    return folder


def main():
    args = parse()
    suffix_of(args.checkpoint_file)
    args.data_dir = find_data(args)
    if "://" not in args.work_dir:
        args.work_dir = os.path.abspath(args.work_dir)
    paths = {name: f"{args.work_dir}/{name}" for name in ("train", "validation", "test")}
    vocabulary, max_sales, constant = prepare(args, paths)
    best = train(args, paths, vocabulary, max_sales)
    print(f"Best RMSPE: {best:.4f}, of a constant guess: {constant:.4f}")
    print(f"{predict(args, paths)} predictions in {args.submission_file}")


if __name__ == "__main__":
    main()
