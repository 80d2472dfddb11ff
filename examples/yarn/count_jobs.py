"""How many messages of each priority the log of a topic holds. PENSTOCK_URL says where."""

from penstock.spark.session import spark_session

spark = spark_session("count-jobs")
jobs = spark.read.format("penstock").option("topic", "jobs").load()
for row in jobs.groupBy("priority").count().orderBy("priority").collect():
    print(f"priority {row['priority']}: {row['count']}")
spark.stop()
