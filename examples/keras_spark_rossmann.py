# SPDX-License-Identifier: Apache-2.0
"""Rossmann Store Sales from end to end: data, training and prediction in one Spark program.

1. Spark reads the CSV files of the competition, joins and completes them, and writes Parquet.
2. A Keras model with an embedding for each category is trained on all task slots by
   horovod.spark.run; each process reads its share of the rows. The best model is kept.
3. Spark predicts the sales asked for, with that model, into a submission file.

    python examples/keras_spark_rossmann.py [--data-dir FOLDER] [--work-dir FOLDER]

Where --data-dir has no train.csv, data of the same form is made up and put there. On a cluster both
folders are to be on a file system all hosts have (--work-dir may be a URL such as hdfs://...).
The same seed gives the same submission.
"""
import argparse
import csv
import datetime
import io
import os
import tempfile

import numpy as np
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

import horovod.spark

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
    return (SparkSession.builder.master(args.master).appName(f"Rossmann: {name}")
            .config("spark.sql.shuffle.partitions", args.partitions)
            .config("spark.ui.showConsoleProgress", "false").getOrCreate())


# --- Part 1: data ------------------------------------------------------------------------------


def with_date(df, text="Date"):
    df = df.withColumn("Date", F.to_date(text))
    return (df.withColumn("Year", F.year("Date")).withColumn("Month", F.month("Date"))
            .withColumn("Week", F.weekofyear("Date")).withColumn("Day", F.dayofmonth("Date")))


def with_flags(df):
    for name in FLAGS:
        df = df.withColumn(name, F.col(name) != "0")
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
    kept = [name for name in ("Id", "Date", "Sales") if name in df.columns]
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


def exp_rmspe(y_true, y_pred):
    """Root mean square percentage error of sales, from their logarithms."""
    import tensorflow as tf

    y_true, y_pred = tf.exp(y_true), tf.exp(y_pred)
    counts = tf.cast(y_true > 0.001, y_pred.dtype)
    share = tf.math.divide_no_nan((y_true - y_pred) * counts, y_true)
    return tf.sqrt(tf.math.divide_no_nan(tf.reduce_sum(share * share), tf.reduce_sum(counts)))


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
    model.compile(keras.optimizers.Adam(args.learning_rate, epsilon=1e-3), loss="mae",
                  metrics=[exp_rmspe])
    return model


def model_to_bytes(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        return open(f"{folder}/model.keras", "rb").read()


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

    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/start.keras", "wb") as file:
            file.write(model_bytes)
        model = hvd.load_model(f"{folder}/start.keras", custom_objects={"exp_rmspe": exp_rmspe})
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
        best = f"{folder}/best.keras"
        if hvd.rank() == 0:
            callbacks.append(keras.callbacks.ModelCheckpoint(best, "val_exp_rmspe", mode="min",
                                                             save_best_only=True))
        history = model.fit(train, shuffle=False, epochs=args.epochs, steps_per_epoch=train_steps,
                            validation_data=validation, validation_steps=validation_steps,
                            callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)
        if hvd.rank() == 0:
            return history.history, open(best, "rb").read()


def train(args, paths, vocabulary, max_sales):
    model = build_model(vocabulary, max_sales, args)
    print(f"Parameters: {model.count_params()}")
    spark = session(args, "training")
    history, best = horovod.spark.run(train_rank, args=(model_to_bytes(model), paths, args),
                                      num_proc=args.num_proc)[0]
    spark.stop()
    with open(args.checkpoint_file, "wb") as file:
        file.write(best)
    return min(history["val_exp_rmspe"])


# --- Part 3: prediction ------------------------------------------------------------------------


def predict_rows(model_bytes, rows):
    """(Id, Sales) of the rows of a partition, many at a time."""
    import itertools

    import keras

    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/model.keras", "wb") as file:
            file.write(model_bytes)
        model = keras.models.load_model(f"{folder}/model.keras", compile=False)
    while some := list(itertools.islice(rows, 1000)):
        features = {name: np.array([[row[name]] for row in some], dtype)
                    for names, dtype in ((CATEGORICAL, "int32"), (CONTINUOUS, "float32"))
                    for name in names}
        told = np.exp(np.asarray(model.predict_on_batch(features), dtype=np.float64).ravel())
        yield from ((row["Id"], float(sales)) for row, sales in zip(some, told))


def predict(args, paths):
    spark = session(args, "prediction")
    with open(args.checkpoint_file, "rb") as file:
        best = file.read()
    test = spark.read.parquet(paths["test"]).coalesce(args.num_proc or args.partitions)
    told = test.rdd.mapPartitions(lambda rows: predict_rows(best, rows)).collect()
    spark.stop()
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["Id", "Sales"])
    lines.writerows((number, f"{sales:.2f}") for number, sales in sorted(told))
    with open(args.submission_file, "w", newline="") as file:
        file.write(text.getvalue())
    return len(told)


def parse():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--master", default="local[2]", help="of the Spark cluster")
    options.add_argument("--num-proc", type=int, help="processes; default: all task slots")
    options.add_argument("--data-dir", default="rossmann", help="where the CSV files are")
    options.add_argument("--work-dir", default="rossmann/prepared", help="for Parquet files")
    options.add_argument("--checkpoint-file", default="rossmann_best.keras")
    options.add_argument("--submission-file", default="submission.csv")
    options.add_argument("--stores", type=int, default=40, help="if data has to be made up")
    options.add_argument("--sample-rate", type=float, default=1.0, help="use a part of the rows")
    options.add_argument("--epochs", type=int, default=100)
    options.add_argument("--batch-size", type=int, default=100)
    options.add_argument("--learning-rate", type=float, default=1e-4)
    options.add_argument("--warmup-epochs", type=int, default=5)
    options.add_argument("--layers", type=int, nargs="+", default=[1000, 1000, 1000, 500])
    options.add_argument("--partitions", type=int, default=8, help="of Spark, when it shuffles")
    options.add_argument("--seed", type=int, default=1)
    return options.parse_args()


def main():
    args = parse()
    if "://" not in args.data_dir:
        args.data_dir = os.path.abspath(args.data_dir)
        if not os.path.exists(f"{args.data_dir}/train.csv"):
            import make_rossmann_data

            make_rossmann_data.make(args.data_dir, args.stores)
            print(f"Made up sales of {args.stores} stores in {args.data_dir}")
    if "://" not in args.work_dir:
        args.work_dir = os.path.abspath(args.work_dir)
    paths = {name: f"{args.work_dir}/{name}" for name in ("train", "validation", "test")}
    vocabulary, max_sales, constant = prepare(args, paths)
    best = train(args, paths, vocabulary, max_sales)
    print(f"Best RMSPE: {best:.4f}, of a constant guess: {constant:.4f}")
    print(f"{predict(args, paths)} predictions in {args.submission_file}")


if __name__ == "__main__":
    main()
