mod fake_cluster;

use expect_test::{Expect, expect};
use fake_cluster::FakeCluster;
use proptest::prelude::*;

#[track_caller]
fn check(cluster: &FakeCluster, expected: Expect) {
    expected.assert_eq(&cluster.log);
}

#[test]
fn rolling_update_stays_within_surge_and_unavailable() {
    let mut cluster = FakeCluster::new(4, "1", "1");
    cluster.run_until_stable();
    check(
        &cluster,
        expect![[r#"
            create a 0->4 revision=1
            status replicas=0 updated=0 available=0 unavailable=4 Progressing=True/NewReplicaSetCreated Available=False/MinimumReplicasUnavailable
            status replicas=4 updated=4 available=0 unavailable=4 Available=False/MinimumReplicasUnavailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=1 unavailable=3 Available=False/MinimumReplicasUnavailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=2 unavailable=2 Available=False/MinimumReplicasUnavailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=3 unavailable=1 Available=True/MinimumReplicasAvailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=4 unavailable=0 Available=True/MinimumReplicasAvailable Progressing=True/NewReplicaSetAvailable
        "#]],
    );
    cluster.log_without_status().template("b").run_until_stable();
    check(
        &cluster,
        expect![[r#"
            create b 0->1 revision=2
            scale a 4->3
            scale b 1->2
            scale a 3->2
            scale b 2->3
            scale a 2->1
            scale b 3->4
            scale a 1->0
        "#]],
    );
    // Rolling back: the first ReplicaSet becomes the new one again.
    cluster.template("a").run_until_stable();
    assert_eq!(cluster.annotation("a", "revision"), "3");
    assert_eq!(cluster.annotation("a", "revision-history"), "1");
    assert_eq!(cluster.annotation("", "revision"), "3");
}

#[test]
fn old_set_is_scaled_down_first_without_surge() {
    let mut cluster = FakeCluster::new(3, "0", "1");
    cluster.run_until_stable().log_without_status().template("b").run_until_stable();
    check(
        &cluster,
        expect![[r#"
        create b 0->0 revision=2
        scale a 3->2
        scale b 0->1
        scale a 2->1
        scale b 1->2
        scale a 1->0
        scale b 2->3
    "#]],
    );
}

#[test]
fn zero_percentages_allow_one_unavailable() {
    let mut cluster = FakeCluster::new(1, "0%", "10%");
    cluster.run_until_stable().log_without_status().template("b").run_until_stable();
    check(
        &cluster,
        expect![[r#"
        create b 0->0 revision=2
        scale a 1->0
        scale b 0->1
    "#]],
    );
}

#[test]
fn broken_template_blocks_rollout_until_replaced() {
    let mut cluster = FakeCluster::new(4, "25%", "25%");
    cluster.run_until_stable().log_without_status().template("bad").run_until_stable();
    check(
        &cluster,
        expect![[r#"
        create bad 0->1 revision=2
        scale a 4->3
        scale bad 1->2
    "#]],
    );
    cluster.log_without_status().template("b").run_until_stable();
    check(
        &cluster,
        expect![[r#"
            create b 0->0 revision=3
            scale bad 2->0
            scale b 0->2
            scale a 3->2
            scale b 2->3
            scale a 2->1
            scale b 3->4
            scale a 1->0
        "#]],
    );
}

#[test]
fn recreate_waits_for_last_old_pod() {
    let mut cluster = FakeCluster::new(2, "0", "0");
    cluster.recreate().run_until_stable().log_without_status().template("b");
    cluster.sync();
    cluster.sync();
    check(
        &cluster,
        expect![[r#"
        scale a 2->0
    "#]],
    );
    cluster.run_until_stable();
    check(
        &cluster,
        expect![[r#"
        scale a 2->0
        create b 0->2 revision=2
    "#]],
    );
}

#[test]
fn proportional_scaling_during_rollout() {
    let mut cluster = FakeCluster::new(10, "3", "2");
    cluster.run_until_stable().template("bad").run_until_stable().log_without_status();
    assert_eq!(cluster.sizes(), "bad=5 a=8");
    cluster.replicas(15).run_until_stable();
    check(
        &cluster,
        expect![[r#"
        scale a 8->11
        scale bad 5->7
    "#]],
    );
    cluster.log_without_status().replicas(5).sync();
    assert_eq!(cluster.sizes(), "bad=3 a=5");
    cluster.run_until_stable();
    cluster.replicas(0).run_until_stable();
    assert_eq!(cluster.sizes(), "bad=0 a=0");
}

#[test]
fn paused_deployment_is_scaled_without_rollout() {
    let mut cluster = FakeCluster::new(2, "1", "0");
    cluster.run_until_stable().paused(true).template("b").run_until_stable();
    assert_eq!(cluster.sizes(), "a=2");
    assert_eq!(cluster.condition("Progressing"), "Unknown/DeploymentPaused Deployment is paused");
    cluster.replicas(3).run_until_stable();
    assert_eq!(cluster.sizes(), "a=3");
    cluster.paused(false).sync();
    assert_eq!(cluster.sizes(), "b=1 a=3");
    cluster.run_until_stable();
    assert_eq!(cluster.sizes(), "b=3 a=0");
}

#[test]
fn deletes_old_sets_over_history_limit() {
    let mut cluster = FakeCluster::new(1, "1", "0");
    cluster.history(2).run_until_stable();
    for template in ["b", "c", "d", "e"] {
        cluster.template(template).run_until_stable();
    }
    assert_eq!(cluster.sizes(), "e=1 c=0 d=0");
    cluster.history(0).run_until_stable();
    assert_eq!(cluster.sizes(), "e=1");
}

#[test]
fn reports_progress_deadline_exceeded_once() {
    let mut cluster = FakeCluster::new(1, "1", "0");
    cluster.run_until_stable().template("bad").run_until_stable().log_without_status();
    assert!(cluster.condition("Progressing").starts_with("True/ReplicaSetUpdated ReplicaSet \"web-"));
    assert_eq!(
        cluster.next.expect("a deadline"),
        cluster.now.checked_add(jiff::SignedDuration::from_secs(600)).expect("a time")
    );
    cluster.advance(601).run_until_stable();
    let condition = cluster.condition("Progressing");
    assert!(condition.starts_with("False/ProgressDeadlineExceeded ReplicaSet \"web-"), "{condition}");
    assert!(condition.ends_with("has timed out progressing."), "{condition}");
    assert_eq!(cluster.next, None);
    cluster.template("b").run_until_stable();
    assert!(cluster.condition("Progressing").starts_with("True/NewReplicaSetAvailable"));
}

#[test]
fn rollback_annotation_is_applied_and_removed() {
    let mut cluster = FakeCluster::new(1, "1", "0");
    cluster.run_until_stable().template("b").run_until_stable();
    cluster.annotate("deprecated.deployment.rollback.to", "0").run_until_stable();
    assert_eq!(cluster.sizes(), "a=1 b=0");
    assert_eq!(cluster.annotation("", "revision"), "3");
    cluster.log_without_status().annotate("deprecated.deployment.rollback.to", "7").sync();
    cluster.annotate("deprecated.deployment.rollback.to", "3").sync();
    check(
        &cluster,
        expect![[r#"
        event DeploymentRollbackRevisionNotFound Unable to find the revision to rollback to.
        write a
        event DeploymentRollbackTemplateUnchanged The rollback revision contains the same template as current deployment "web"
        write a
    "#]],
    );
}

#[test]
fn annotations_follow_the_deployment() {
    let mut cluster = FakeCluster::new(1, "1", "0");
    cluster.run_until_stable().annotate("kubernetes.io/change-cause", "why").run_until_stable();
    assert_eq!(cluster.annotation("a", "change-cause"), "why");
    assert_eq!(cluster.annotation("a", "desired-replicas"), "1");
    assert_eq!(cluster.annotation("a", "max-replicas"), "2");
}

#[test]
fn set_name_fits_limit_and_changes_after_collision() {
    let mut deployment = FakeCluster::new(1, "1", "0").deployment;
    let name = |deployment: &super::Deployment| match &super::plan(
        deployment,
        &[],
        |_| false,
        jiff::Timestamp::UNIX_EPOCH,
    )[..]
    {
        [super::Action::CreateSet(set), ..] => set.metadata.name.clone().expect("a name"),
        other => panic!("{other:?}"),
    };
    let before = name(&deployment);
    assert_ne!(before, name(&super::increment_collision_count(&deployment)));
    assert!(before.strip_prefix("web-").is_some_and(|hash| (5..=10).contains(&hash.len())));
    deployment.metadata.name = Some("x".repeat(253));
    assert_eq!(name(&deployment).len(), 253);
}

#[derive(Clone, Debug)]
enum Step {
    Sync,
    Sets(usize),
    Pod(usize),
    Break(usize),
    Template(usize),
    Replicas(i32),
    Paused(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => Just(Step::Sync),
        6 => (0..4_usize).prop_map(Step::Sets),
        6 => (0..4_usize).prop_map(Step::Pod),
        1 => (0..4_usize).prop_map(Step::Break),
        1 => (0..4_usize).prop_map(Step::Template),
        1 => (0..12_i32).prop_map(Step::Replicas),
        1 => any::<bool>().prop_map(Step::Paused),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// For any sequence of operations, no step exceeds `maxSurge` or `maxUnavailable`, and finally all pods
    /// are of the new template and the plan is empty.
    #[test]
    fn rollout_stays_within_limits_and_completes(
        replicas in 0..12_i32,
        surge in prop_oneof![Just("0"), Just("1"), Just("3"), Just("25%"), Just("100%")],
        unavailable in prop_oneof![Just("0"), Just("1"), Just("2"), Just("25%"), Just("50%")],
        recreate in prop::bool::weighted(0.2),
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut cluster = FakeCluster::new(replicas, surge, unavailable);
        if recreate {
            cluster.recreate();
        }
        for step in steps {
            match step {
                Step::Sync => cluster.sync_checked(),
                Step::Sets(i) => cluster.sync_replica_set(i),
                Step::Pod(i) => cluster.make_pod_available(i),
                Step::Break(i) => cluster.break_pod(i),
                Step::Template(i) => _ = cluster.template(["a", "b", "bad", "c"][i]),
                Step::Replicas(replicas) => _ = cluster.replicas(replicas),
                Step::Paused(paused) => _ = cluster.paused(paused),
            }
        }
        cluster.paused(false).template("end").run_until_stable();
        let replicas = cluster.limits().replicas;
        for (template, size) in cluster.sizes().split(' ').filter_map(|word| word.split_once('=')) {
            prop_assert_eq!(size, if template == "end" { replicas.to_string() } else { "0".to_owned() });
        }
        prop_assert!(super::status::is_complete(&cluster.deployment, cluster.deployment.status.as_ref()));
        cluster.log_without_status();
        cluster.log.clear();
        cluster.sync();
        prop_assert_eq!(&cluster.log, "");
    }
}
