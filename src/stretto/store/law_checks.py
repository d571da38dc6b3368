"""The checks of `verify`: a law, and a query with one sentence for each break of it.

The parameters are the facts of the run (`schema.RunFacts`), whether it is `:finished`, whether it `:drops` trajectories
(the paradigm gives up law 2), and whether a trajectory `:continues` under newer weights (it gives up law 1). A recipe
with redundancy gives up law 2 too, for what is not needed alone. Then `:members` is what a group starts with, `:group`
what it needs, and `:drains` says that a version is published only when nothing runs that the batches need. `:tasks` has
the label, the rows and the order of each task as JSON; a task without a label has NULL.
"""

from stretto.store.schema import LARGEST_ID, STALENESS_OF_PHASE

# The state changes that a journal may have; none leaves an end. `NULL` is before the admission. This table is written
# down apart from that of the core, and a test compares the two.
LEGAL_MOVES = """(VALUES
    (NULL, 'running'),
    ('waiting', 'waiting'), ('waiting', 'running'), ('waiting', 'failed'), ('waiting', 'dropped'),
    ('running', 'waiting'), ('running', 'running'), ('running', 'scoring'), ('running', 'failed'),
    ('running', 'dropped'),
    ('scoring', 'scored'), ('scoring', 'failed'), ('scoring', 'dropped'),
    ('scored', 'scoring'), ('scored', 'training'), ('scored', 'filtered'), ('scored', 'dropped'),
    ('training', 'scored'), ('training', 'trained'))"""

# Every batch that was taken, and the first transition of its taking; those included that were given back untrained.
# Updates are trained one after the other, so one that was given back was of the update after those trained before it.
TAKINGS = """
    lasts AS (SELECT trajectory, MAX(seq) AS seq FROM transitions WHERE to_state = 'training' GROUP BY trajectory),
    kept AS (SELECT update_id, MIN(seq) AS taken FROM members JOIN lasts USING (trajectory)
        WHERE use = 0 GROUP BY update_id),
    done AS (SELECT update_id, MIN(seq) AS seq FROM members JOIN transitions USING (trajectory)
        WHERE use = 0 AND to_state = 'trained' GROUP BY update_id),
    given_back AS (SELECT MIN((SELECT MAX(seq) FROM transitions b WHERE b.trajectory = t.trajectory AND b.seq < t.seq))
        AS taken FROM transitions t WHERE from_state = 'training' AND to_state = 'scored' GROUP BY at),
    batches AS (SELECT update_id, taken FROM kept
        UNION ALL SELECT (SELECT COUNT(*) FROM done WHERE done.seq < taken), taken FROM given_back)"""

# Each dropped trajectory, when it was dropped, and the last update whose batch had been taken by then (-1: none).
DROPS = """
    ended AS (SELECT trajectory, group_id, MIN(seq) AS seq FROM transitions JOIN trajectories USING (trajectory)
        WHERE to_state = 'dropped' GROUP BY trajectory),
    drops AS (SELECT trajectory, group_id, seq,
        COALESCE((SELECT MAX(update_id) FROM batches WHERE taken < seq), -1) AS last_taken FROM ended)"""

# The last update of each phase as it was planned, and the first group of the phase after it.
LAST_UPDATES = f"""(SELECT json_extract(facts, '$.updates') - 1 AS last_update,
        LEAD(first_group, 1, {LARGEST_ID}) OVER (ORDER BY phase) AS next_group FROM phases
    UNION ALL SELECT :updates - 1, {LARGEST_ID})"""

# Every group with the rows and the order of its task.
DRAWN = """tasks AS (SELECT json_extract(value, '$[0]') AS label, json_extract(value, '$[1]') AS num_rows,
        json_extract(value, '$[2]') AS row_order, json_extract(value, '$[3]') AS num_dropped FROM json_each(:tasks)),
    drawn AS (SELECT group_id, epoch, row_number, task, task_index, draw, num_rows, row_order, num_dropped,
        iif(task IS NULL, '', ' of task ' || task) AS of_task FROM groups JOIN tasks ON label IS task)"""

CHECKS: tuple[tuple[str, str], ...] = (
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' has version ' || t.version || ', its group ' || group_id ||
            ' has version ' || g.version
        FROM trajectories t JOIN groups g USING (group_id) WHERE t.version <> g.version""",
    ),
    (
        "1",
        """SELECT 'version ' || version || ' of group ' || group_id || ' was never published'
        FROM groups WHERE version NOT IN (SELECT version FROM versions)""",
    ),
    (
        "1",
        """SELECT 'version ' || (previous + 1) || ' is missing: version ' || version || ' came next'
        FROM (SELECT version, LAG(version, 1, -1) OVER (ORDER BY version) AS previous FROM versions)
        WHERE version <> previous + 1""",
    ),
    (
        "1",
        """SELECT 'update ' || update_id || ' is finished and version ' || (update_id + 1) || ' was never published'
        FROM updates WHERE finished_at IS NOT NULL AND update_id + 1 NOT IN (SELECT version FROM versions)
            AND (:finished OR update_id < (SELECT MAX(update_id) FROM updates))""",
    ),
    (
        "1",
        """SELECT 'version ' || version || ' was published before update ' || (version - 1) || ' had trained it'
        FROM versions
        WHERE version > (SELECT COALESCE(MAX(update_id) + 1, 0) FROM updates)
            OR published_after < (SELECT COALESCE(MAX(seq), 0) FROM transitions JOIN members USING (trajectory)
                WHERE update_id = version - 1 AND use = 0 AND to_state = 'trained')""",
    ),
    (
        "1",
        """SELECT 'version ' || version || ' was published as ' || v.checksum || ', and update ' || update_id ||
            ' had made ' || u.checksum
        FROM versions v JOIN updates u ON update_id = version - 1 WHERE u.checksum <> v.checksum""",
    ),
    (
        "1",
        """SELECT 'update ' || update_id || ' is finished and does not say which weights it made'
        FROM updates WHERE finished_at IS NOT NULL AND checksum IS NULL""",
    ),
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' started before an engine held its version ' || version
        FROM trajectories JOIN transitions USING (trajectory) JOIN versions USING (version)
        WHERE from_state IS NULL AND (loaded_after IS NULL OR seq <= loaded_after)""",
    ),
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' started before its version ' || version || ' was published'
        FROM trajectories JOIN transitions USING (trajectory) JOIN versions USING (version)
        WHERE from_state IS NULL AND seq <= published_after""",
    ),
    (
        "1",
        """SELECT 'trajectories ' || MIN(trajectory) || ' and ' || MAX(trajectory) || ' share the seed ' || seed
        FROM trajectories GROUP BY seed HAVING COUNT(*) > 1""",
    ),
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' of version ' || t.version || ' went to instance ' || target ||
            ' under version ' || m.version
        FROM moves m JOIN trajectories t USING (trajectory) WHERE NOT :continues AND m.version <> t.version""",
    ),
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' has no receipt of the engine `' || :engine || '`'
        FROM completions WHERE :engine <> 'native' AND receipts IS NULL""",
    ),
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' has the receipt `' || value || '`, which was never given'
        FROM completions c, json_each(c.receipts) WHERE value NOT IN (SELECT id FROM receipts)""",
    ),
    (
        "1",
        """SELECT 'trajectory ' || trajectory || ' of version ' || c.version || ' and weights ' || c.checksum ||
            ' has the receipt `' || r.id || '` of version ' || r.version || ' and weights ' || r.checksum
        FROM completions c, json_each(c.receipts) JOIN receipts r ON r.id = value
        WHERE r.version <> c.version OR r.checksum <> c.checksum""",
    ),
    (
        "1",
        """SELECT 'receipt `' || id || '` of version ' || version || ' has a difference of ' || mean_difference ||
            ', more than ' || tolerance FROM receipts WHERE NOT mean_difference <= tolerance""",
    ),
    (
        "1",
        """SELECT 'receipts `' || MIN(id) || '` and `' || MAX(id) || '` of version ' || version || ' and weights ' ||
            checksum || ' are of engines that held different weights'
        FROM receipts WHERE held NOTNULL GROUP BY version, checksum, served_by, layout
        HAVING COUNT(DISTINCT held) > 1""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' went to instance ' || target || ', which was not there'
        FROM moves m WHERE NOT EXISTS (SELECT 1 FROM instances i
            WHERE i.instance = m.target AND i.joined_at <= m.at)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' was on instance ' || instance || ', which never joined' FROM (
            SELECT trajectory, instance FROM trajectories WHERE instance IS NOT NULL
            UNION SELECT trajectory, source FROM moves WHERE source IS NOT NULL)
        WHERE instance NOT IN (SELECT instance FROM instances)""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' has ' || COUNT(trajectory) || ' trajectories, not ' || :members
        FROM groups LEFT JOIN trajectories USING (group_id) GROUP BY group_id HAVING COUNT(trajectory) <> :members""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is member ' || member || ' of group ' || group_id ||
            iif(group_id IN (SELECT group_id FROM groups), ', which is not its place', ', which was never admitted')
        FROM trajectories WHERE trajectory <> group_id * :members + member OR member NOT BETWEEN 0 AND :members - 1
            OR group_id NOT IN (SELECT group_id FROM groups)""",
    ),
    (
        "2",
        """SELECT 'the prompt of group ' || (previous + 1) || ' was skipped: group ' || group_id || ' came next'
        FROM (SELECT group_id, LAG(group_id, 1, -1) OVER (ORDER BY group_id) AS previous FROM groups)
        WHERE group_id <> previous + 1""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' has prompt ' || prompt_index || ' of the stream, not its own'
        FROM groups WHERE prompt_index <> group_id""",
    ),
    # With the three below, and no group skipped, an epoch that is over has drawn every row exactly once.
    (
        "2",
        f"""WITH {DRAWN}
        SELECT 'groups ' || MIN(group_id) || ' and ' || MAX(group_id) || ' are both drawn from row ' || row_number ||
            of_task || ' in epoch ' || COALESCE(epoch, 'none')
        FROM drawn WHERE row_order = 'shuffled' GROUP BY task, epoch, row_number HAVING COUNT(*) > 1""",
    ),
    (
        "2",
        f"""WITH {DRAWN}
        SELECT 'group ' || group_id || ' is drawn from row ' || row_number || of_task || ' of ' ||
            (num_rows + num_dropped)
        FROM drawn WHERE row_number NOT BETWEEN 0 AND num_rows + num_dropped - 1""",
    ),
    (
        "2",
        f"""WITH {DRAWN}
        SELECT 'group ' || group_id || ' is of epoch ' || COALESCE(epoch, 'none') || ', and prompt ' ||
            task_index || of_task || ' of ' || num_rows || ' rows is of epoch ' || (task_index / num_rows)
        FROM drawn WHERE row_order = 'shuffled' AND epoch IS NOT task_index / num_rows""",
    ),
    (
        "2",
        f"""WITH {DRAWN}
        SELECT 'group ' || group_id || iif(epoch IS NULL, ' does not say why its row was drawn',
            ' is of epoch ' || epoch || ', and rows that come by their pass rate have none')
        FROM drawn WHERE row_order = 'pass-rate' AND (epoch IS NOT NULL OR draw = '')""",
    ),
    (
        "2",
        f"""WITH {DRAWN}
        SELECT 'group ' || group_id || iif(task IS NULL, ' has no task', ' is of task ' || task) ||
            ', which the run does not have'
        FROM groups WHERE group_id NOT IN (SELECT group_id FROM drawn)""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' is group ' || task_index || iif(task IS NULL, '', ' of task ' || task) ||
            ', and ' || place || ' came before it'
        FROM (SELECT group_id, task, task_index, ROW_NUMBER() OVER (PARTITION BY task ORDER BY group_id) - 1 AS place
            FROM groups) WHERE task_index <> place""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || iif(is_counted, ' is counted as lost and is not', ' is lost and not counted')
        FROM (SELECT group_id, lost_before NOTNULL AS is_counted,
                SUM(state NOT IN ('failed', 'filtered', 'dropped')) = 0 AS is_lost, MAX(state = 'trained') AS is_trained
            FROM groups JOIN trajectories USING (group_id) WHERE :order = 'mixed' GROUP BY group_id)
        WHERE (is_counted AND is_trained) OR (:finished AND is_counted <> is_lost)""",
    ),
    (
        "2",
        f"""WITH legal(source, target) AS {LEGAL_MOVES},
        chain AS (SELECT seq, trajectory, from_state, to_state,
            LAG(to_state) OVER (PARTITION BY trajectory ORDER BY seq) AS previous FROM transitions)
        SELECT 'trajectory ' || trajectory || ' went from ' || COALESCE(previous, 'nothing') || ' to ' || to_state ||
            iif(from_state IS previous, '', ', recorded as from ' || COALESCE(from_state, 'nothing'))
        FROM chain LEFT JOIN legal ON legal.source IS chain.from_state AND legal.target = chain.to_state
        WHERE legal.target IS NULL OR from_state IS NOT previous""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || t.trajectory || ' is ' || t.state || ', its last transition says ' ||
            COALESCE(x.to_state, 'nothing')
        FROM trajectories t LEFT JOIN (SELECT trajectory, to_state, MAX(seq) FROM transitions GROUP BY trajectory) x
        USING (trajectory) WHERE x.to_state IS NOT t.state""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is recorded in ' || what || ' and was never admitted' FROM (
            SELECT trajectory, 'transitions' AS what FROM transitions
            UNION SELECT trajectory, 'completions' FROM completions UNION SELECT trajectory, 'a batch' FROM members
            UNION SELECT trajectory, 'failures' FROM failures UNION SELECT trajectory, 'moves' FROM moves)
        WHERE trajectory NOT IN (SELECT trajectory FROM trajectories)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is ' || state || ' and in no batch' FROM trajectories
        WHERE state IN ('training', 'trained')
            AND trajectory NOT IN (SELECT trajectory FROM members WHERE use = 0)""",
    ),
    (
        "2",
        """SELECT DISTINCT 'trajectory ' || trajectory || ' is in the batch of update ' || update_id || ' and ' || state
        FROM members JOIN trajectories USING (trajectory) JOIN updates USING (update_id)
        WHERE state <> iif(finished_at IS NULL AND use = 0, 'training', 'trained')""",
    ),
    (
        "2",
        """SELECT DISTINCT 'trajectory ' || trajectory || ' was in a batch without its ' ||
            iif(COALESCE(num_sampled, 0) = 0, 'tokens', 'reward') ||
            iif(lineage AND COALESCE(num_sampled, 0) = 0, ' of lineage ' || lineage, '')
        FROM members JOIN trajectories USING (trajectory) LEFT JOIN completions USING (trajectory, lineage)
        WHERE COALESCE(num_sampled, 0) = 0 OR reward IS NULL OR typeof(reward) NOT IN ('real', 'integer')
            OR ABS(reward) > 1.7976931348623157e308""",
    ),
    (
        "2",
        """WITH RECURSIVE numbers(lineage) AS (SELECT 0 UNION ALL SELECT lineage + 1 FROM numbers
            WHERE lineage + 1 < (SELECT MAX(num_lineages) FROM trajectories) LIMIT 100000)
        SELECT 'lineage ' || n.lineage || ' of trajectory ' || t.trajectory || ' is missing: it has ' || num_lineages
        FROM trajectories t JOIN numbers n ON n.lineage < num_lineages
        WHERE NOT EXISTS (SELECT 1 FROM completions c WHERE c.trajectory = t.trajectory AND c.lineage = n.lineage)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' has a lineage ' || lineage || ', and it has ' ||
            COALESCE(num_lineages, 'none')
        FROM completions JOIN trajectories USING (trajectory)
        WHERE num_lineages IS NULL OR lineage NOT BETWEEN 0 AND num_lineages - 1""",
    ),
    (
        "2",
        """SELECT 'lineage ' || lineage || ' of trajectory ' || trajectory || ' is in the batch of update ' ||
            update_id || ', and is not to be trained'
        FROM members JOIN completions USING (trajectory, lineage) WHERE train IS NOT 1""",
    ),
    (
        "2",
        """SELECT 'lineage ' || c.lineage || ' of trajectory ' || trajectory ||
            ' is missing from the batch of update ' || m.update_id || ', which has others of that trajectory'
        FROM (SELECT DISTINCT update_id, trajectory, use FROM members) m JOIN completions c USING (trajectory)
        WHERE c.train = 1 AND NOT EXISTS (SELECT 1 FROM members x WHERE x.trajectory = m.trajectory
            AND x.lineage = c.lineage AND x.use = m.use AND x.update_id = m.update_id)""",
    ),
    (
        "2",
        """SELECT DISTINCT 'trajectory ' || m.trajectory || ' was taken into a batch before its reward was recorded'
        FROM members m JOIN transitions taken ON taken.trajectory = m.trajectory AND taken.to_state = 'training'
        WHERE NOT EXISTS (SELECT 1 FROM transitions s
            WHERE s.trajectory = m.trajectory AND s.to_state = 'scored' AND s.seq < taken.seq)""",
    ),
    (
        "2",
        """SELECT 'update ' || update_id || ' has a batch of ' || COUNT(DISTINCT group_id) || ' groups, not ' || :batch
        FROM updates LEFT JOIN (SELECT * FROM members WHERE use = 0) USING (update_id)
        LEFT JOIN trajectories USING (trajectory)
        GROUP BY update_id HAVING COUNT(DISTINCT group_id) <> :batch""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || t.trajectory || ' is ' || t.state || ', but others of its group ' || t.group_id ||
            ' are in the batch of update ' || taken.update_id
        FROM trajectories t
        JOIN (SELECT group_id, MIN(update_id) AS update_id FROM members JOIN trajectories USING (trajectory)
            WHERE use = 0 GROUP BY group_id) taken USING (group_id)
        WHERE t.state <> 'failed' AND NOT (:reserve_members AND (t.state = 'dropped' OR NOT :finished))
            AND NOT EXISTS (SELECT 1 FROM members m
                WHERE m.trajectory = t.trajectory AND m.use = 0 AND m.update_id = taken.update_id)""",
    ),
    (
        "2",
        """SELECT 'in the batch of update ' || update_id || ' trajectory ' || trajectory ||
            ' does not follow by version, group and member'
        FROM (SELECT update_id, trajectory, g.version, group_id, member, lineage,
                LAG(g.version) OVER batch AS previous_version, LAG(group_id) OVER batch AS previous_group,
                LAG(member) OVER batch AS previous_member, LAG(lineage) OVER batch AS previous_lineage
            FROM members JOIN trajectories USING (trajectory) JOIN groups g USING (group_id) WHERE use = 0
            WINDOW batch AS (PARTITION BY update_id ORDER BY position))
        WHERE (version, group_id, member, lineage) <
            (previous_version, previous_group, previous_member, previous_lineage)""",
    ),
    (
        "2",
        """SELECT 'in the batch of update ' || update_id || ' trajectory ' || trajectory || ', used again, ' ||
            iif(next_use = 0, 'comes before one that is not', 'does not follow by version, group and member')
        FROM (SELECT update_id, trajectory, use, g.version, group_id, member, lineage,
                LEAD(use) OVER batch AS next_use, LAG(use) OVER batch AS before,
                LAG(g.version) OVER batch AS previous_version, LAG(group_id) OVER batch AS previous_group,
                LAG(member) OVER batch AS previous_member, LAG(lineage) OVER batch AS previous_lineage
            FROM members JOIN trajectories USING (trajectory) JOIN groups g USING (group_id)
            WINDOW batch AS (PARTITION BY update_id ORDER BY position))
        WHERE use <> 0 AND (next_use = 0 OR (before <> 0 AND
            (version, group_id, member, lineage) <
                (previous_version, previous_group, previous_member, previous_lineage)))""",
    ),
    (
        "2",
        """SELECT 'update ' || (previous + 1) || ' is missing: update ' || update_id || ' came next'
        FROM (SELECT update_id, LAG(update_id, 1, -1) OVER (ORDER BY update_id) AS previous FROM updates)
        WHERE update_id <> previous + 1""",
    ),
    (
        "2",
        """SELECT 'update ' || update_id || ' was not finished, and later ones were taken' FROM updates
        WHERE finished_at IS NULL AND update_id < (SELECT MAX(update_id) FROM updates)""",
    ),
    (
        "2",
        """SELECT 'the run is finished with ' || done || ' of ' || :updates || ' updates'
        FROM (SELECT COUNT(finished_at) AS done FROM updates) WHERE :finished AND done <> :updates""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' failed ' || COUNT(*) || ' times in ' || kind ||
            ', the recipe allows ' || (:retries + 1)
        FROM failures GROUP BY trajectory, kind HAVING COUNT(*) > :retries + 1""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is ' || state || ' after its last try in ' || kind || ' failed'
        FROM trajectories JOIN (SELECT trajectory, kind FROM failures GROUP BY trajectory, kind
            HAVING COUNT(*) > :retries) USING (trajectory)
        WHERE state IN ('scored', 'training', 'trained')""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is failed before its ' || :retries || ' retries were used'
        FROM trajectories WHERE state = 'failed' AND trajectory NOT IN (
            SELECT trajectory FROM failures GROUP BY trajectory, kind HAVING COUNT(*) > :retries)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' lost its reward, and no failed try says why' FROM transitions t
        WHERE from_state = 'scored' AND to_state = 'scoring' AND NOT EXISTS (SELECT 1 FROM failures f
            WHERE f.trajectory = t.trajectory AND kind = 'scoring' AND f.at = t.at AND f.reason = t.reason)""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' was taken into a batch that was given back, and no reward was why'
        FROM transitions t WHERE from_state = 'training' AND to_state = 'scored' AND NOT EXISTS (
            SELECT 1 FROM transitions r WHERE r.at = t.at AND r.from_state = 'scored' AND r.to_state = 'scoring')""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is filtered, and the recipe filters nothing' FROM trajectories
        WHERE state = 'filtered' AND NOT :filter_limit""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' is filtered, and ' || iif(SUM(state NOT IN ('filtered', 'failed')),
            'others of it are not', iif(SUM(state = 'filtered' AND reward IS NULL), 'not all of it was scored',
            'its rewards differ: ' || MIN(reward) || ' and ' || MAX(reward)))
        FROM trajectories WHERE :filter_limit AND NOT (:reserve_members AND state = 'dropped') GROUP BY group_id
        HAVING SUM(state = 'filtered') AND (SUM(state NOT IN ('filtered', 'failed'))
            OR SUM(state = 'filtered' AND reward IS NULL) OR MIN(reward) <> MAX(reward))""",
    ),
    (
        "2",
        f"""WITH {TAKINGS},
            ends AS (SELECT MIN(seq) AS seq FROM transitions JOIN trajectories USING (trajectory)
                WHERE to_state = 'filtered' GROUP BY group_id)
        SELECT COUNT(*) || ' groups were filtered before the batch of update ' || before || ', the recipe allows ' ||
            :filter_limit
        FROM (SELECT (SELECT COUNT(*) FROM batches WHERE taken < ends.seq) AS num_taken,
                (SELECT COUNT(*) FROM kept WHERE taken < ends.seq) AS before FROM ends)
        WHERE :filter_limit GROUP BY num_taken HAVING COUNT(*) > :filter_limit""",
    ),
    (
        "2",
        """SELECT 'group ' || group_id || ' was spared from being filtered, and ' || iif(MIN(reward) <> MAX(reward),
            'its rewards differ', 'the recipe filters nothing')
        FROM groups JOIN trajectories USING (group_id)
        WHERE spared IS NOT NULL AND NOT (:reserve_members AND state = 'dropped')
        GROUP BY group_id HAVING MIN(reward) <> MAX(reward) OR NOT :filter_limit""",
    ),
    (
        "2",
        """SELECT 'trajectory ' || trajectory || ' is dropped, and neither paradigm nor recipe drops anything'
        FROM trajectories WHERE state = 'dropped' AND NOT :drops AND NOT :reserve_groups AND NOT :reserve_members""",
    ),
    (
        "2",
        """SELECT 'the run is finished, and trajectory ' || trajectory || ' is still ' || state FROM trajectories
        WHERE :finished AND state NOT IN ('trained', 'failed', 'filtered', 'dropped')""",
    ),
    (
        "2",
        f"""WITH {TAKINGS},
            ends AS (SELECT group_id, MIN(seq) AS seq FROM transitions JOIN trajectories USING (trajectory)
                WHERE to_state = 'dropped' GROUP BY group_id)
        SELECT 'group ' || group_id || ' was dropped before the batch of update ' || deadline ||
            ', its deadline, was taken'
        FROM ends JOIN groups USING (group_id)
        WHERE :drops AND NOT EXISTS (SELECT 1 FROM batches WHERE update_id >= deadline AND taken < ends.seq)""",
    ),
    # With redundancy, a dropped trajectory is one too many in its group, or in a group that came too late for a batch.
    (
        "2",
        f"""WITH {TAKINGS}, {DROPS},
            others AS (SELECT group_id, SUM(state NOT IN ('dropped', 'failed')) AS num FROM trajectories
                GROUP BY group_id)
        SELECT 'trajectory ' || trajectory || ' was dropped before ' ||
            iif(num, :group || ' others of its group ' || group_id || ' had rewards',
                'the batch of update ' || MIN(deadline, :updates - 1) || ' was taken')
        FROM drops JOIN groups g USING (group_id) JOIN others USING (group_id)
        WHERE (:reserve_groups OR :reserve_members)
            AND NOT (:reserve_members AND :group <= (SELECT COUNT(DISTINCT s.trajectory) FROM transitions s
                JOIN trajectories o ON o.trajectory = s.trajectory WHERE o.group_id = drops.group_id
                AND s.trajectory <> drops.trajectory AND s.to_state = 'scored' AND s.seq < drops.seq))
            AND NOT (:reserve_groups AND NOT num AND (
                last_taken >= deadline
                OR last_taken IN (SELECT last_update FROM {LAST_UPDATES} WHERE g.group_id < next_group)
                OR (:drains AND EXISTS (SELECT 1 FROM versions v WHERE v.version > g.version
                    AND v.published_after < drops.seq))))""",
    ),
    # All groups that one batch leaves behind were in reserve at once. A publish that drains leaves as many.
    (
        "2",
        f"""WITH {TAKINGS}, {DROPS}
        SELECT num || ' groups were dropped with the batch of update ' || due || ', the recipe has ' ||
            :reserve_groups || ' in reserve'
        FROM (SELECT due, COUNT(*) AS num FROM (
                SELECT iif(:drains, deadline, MIN(deadline, MAX(last_taken))) AS due
                FROM drops JOIN groups USING (group_id) WHERE group_id NOT IN (
                    SELECT group_id FROM trajectories WHERE state NOT IN ('dropped', 'failed'))
                GROUP BY group_id) GROUP BY due)
        WHERE (:reserve_groups OR :reserve_members) AND num > :reserve_groups * (1 + :drains)""",
    ),
    (
        "2",
        """SELECT 'update ' || update_id || ' trains on ' || COUNT(DISTINCT trajectory) || ' trajectories of group ' ||
            group_id || ', the recipe on ' || :group
        FROM members JOIN trajectories USING (trajectory) WHERE use = 0
        GROUP BY update_id, group_id HAVING COUNT(DISTINCT trajectory) > :group""",
    ),
    (
        "3",
        """SELECT DISTINCT 'trajectory ' || trajectory || ' of version ' || t.version ||
            ' is in the batch of update ' || update_id || ', ' || (update_id - t.version) ||
            ' updates later; it was admitted under ' || staleness
        FROM members JOIN trajectories t USING (trajectory) JOIN groups USING (group_id)
        WHERE update_id - t.version NOT BETWEEN 0 AND staleness""",
    ),
    (
        "3",
        """SELECT 'group ' || group_id || ' of version ' || version || ' was admitted before phase ' || phase ||
            ', which begins with update ' || first_update
        FROM phases JOIN groups ON group_id < first_group WHERE version > first_update""",
    ),
    (
        "3",
        """SELECT DISTINCT 'update ' || update_id || ' trained on group ' || group_id || ', which was admitted in ' ||
            'phase ' || phase || ', and that begins with update ' || first_update
        FROM members JOIN trajectories USING (trajectory) JOIN phases ON group_id >= first_group
        WHERE update_id < first_update""",
    ),
    (
        "3",
        f"""WITH {TAKINGS}
        SELECT 'the batch of update ' || update_id || ' was taken before version ' || version ||
            ', which it trains, was published'
        FROM batches JOIN versions ON version = update_id WHERE taken <= published_after""",
    ),
    (
        "3",
        """SELECT 'group ' || group_id || ' was trained at update ' || MAX(update_id) || ', its deadline was ' ||
            deadline
        FROM members JOIN trajectories USING (trajectory) JOIN groups USING (group_id)
        GROUP BY group_id HAVING MAX(update_id) > deadline""",
    ),
    (
        "3",
        f"""SELECT 'group ' || group_id || ' was admitted under staleness ' || staleness || ', the run allows ' ||
            {STALENESS_OF_PHASE}
        FROM groups WHERE staleness NOT BETWEEN 0 AND {STALENESS_OF_PHASE}""",
    ),
    (
        "3",
        """SELECT 'group ' || group_id || ' has deadline ' || deadline || ', not version ' || version ||
            ' + staleness ' || staleness
        FROM groups WHERE deadline <> version + staleness""",
    ),
    (
        "3",
        """WITH late AS (SELECT DISTINCT group_id, deadline FROM groups JOIN trajectories USING (group_id)
            WHERE state IN ('running', 'waiting', 'scoring', 'scored')
                AND deadline <= (SELECT MAX(update_id) FROM updates) AND NOT (:reserve_members AND group_id IN (
                    SELECT group_id FROM members JOIN trajectories USING (trajectory))))
        SELECT 'group ' || group_id || ' is under way and missed its deadline, update ' || deadline
        FROM late WHERE NOT :drops AND (SELECT COUNT(*) FROM late) > :reserve_groups""",
    ),
    (
        "once",
        """SELECT iif(lineage, 'lineage ' || lineage || ' of ', '') || 'trajectory ' || trajectory || ' is trained ' ||
            COUNT(*) || ' times as use ' || use || ', in updates ' || MIN(update_id) || ' and ' || MAX(update_id)
        FROM members GROUP BY trajectory, lineage, use HAVING COUNT(*) > 1""",
    ),
    (
        "once",
        """SELECT 'trajectory ' || trajectory || ' has ' || COUNT(*) || ' ends' FROM transitions
        WHERE to_state IN ('trained', 'failed', 'filtered', 'dropped') GROUP BY trajectory HAVING COUNT(*) > 1""",
    ),
    (
        "once",
        """SELECT DISTINCT 'trajectory ' || trajectory || ' was used again and never trained'
        FROM members WHERE use <> 0 AND trajectory NOT IN (SELECT trajectory FROM members WHERE use = 0)""",
    ),
    (
        "once",
        """SELECT DISTINCT 'trajectory ' || trajectory || ' is used again in update ' || update_id ||
            ' as use ' || use || ', and use ' || (use - 1) || ' was not before it'
        FROM members m WHERE use <> 0 AND trajectory IN (SELECT trajectory FROM members WHERE use = 0)
            AND NOT EXISTS (SELECT 1 FROM members b
                WHERE b.trajectory = m.trajectory AND b.use = m.use - 1 AND b.update_id < m.update_id)""",
    ),
    (
        "once",
        """SELECT 'trajectory ' || trajectory || ' is used again ' || MAX(use) || ' times, the recipe allows ' ||
            :replay_uses
        FROM members GROUP BY trajectory HAVING MAX(use) > :replay_uses""",
    ),
    (
        "once",
        """SELECT 'update ' || update_id || ' uses ' || COUNT(DISTINCT group_id) ||
            ' groups again, the recipe allows ' || :replay_groups
        FROM members JOIN trajectories USING (trajectory) WHERE use <> 0
        GROUP BY update_id HAVING COUNT(DISTINCT group_id) > :replay_groups""",
    ),
    (
        "once",
        """WITH again AS (SELECT update_id, group_id, use, COUNT(DISTINCT trajectory) AS num FROM members
                JOIN trajectories USING (trajectory) WHERE use <> 0 GROUP BY update_id, group_id, use),
            first AS (SELECT group_id, COUNT(DISTINCT trajectory) AS num FROM members
                JOIN trajectories USING (trajectory) WHERE use = 0 GROUP BY group_id)
        SELECT 'update ' || update_id || ' uses ' || again.num || ' of the ' || first.num ||
            ' trajectories of group ' || group_id || ' again'
        FROM again JOIN first USING (group_id) WHERE again.num <> first.num""",
    ),
)
