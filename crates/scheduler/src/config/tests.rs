use expect_test::{Expect, expect};

use super::Config;
use crate::framework::Profile;
use crate::framework::registry::IN_TREE_PLUGINS;

fn read(body: &str) -> Result<Config, String> {
    let text =
        format!("apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n{body}");
    Config::read(&text).map_err(|error| error.to_string())
}

fn render_profile(profile: &Profile) -> String {
    fn names<T: ?Sized>(point: &[(&'static str, std::sync::Arc<T>)]) -> String {
        point.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
    }
    let scorers: Vec<String> =
        profile.scorers.iter().map(|one| format!("{}={}", one.plugin, one.weight)).collect();
    format!(
        "{}\nfilter: {}\nscore: {}\npostFilter: {}\nbind: {}\n",
        profile.scheduler_name,
        names(&profile.pre_filter),
        scorers.join(" "),
        names(&profile.post_filter),
        names(&profile.bind),
    )
}

#[track_caller]
fn check(body: &str, expected: Expect) {
    let rendered = match read(body) {
        Err(message) => message,
        Ok(config) => match config.profiles(IN_TREE_PLUGINS) {
            Err(error) => error.to_string(),
            Ok(profiles) => profiles.iter().map(render_profile).collect(),
        },
    };
    expected.assert_eq(&rendered);
}

#[test]
fn default_plugins_match_upstream() {
    check(
        "",
        expect![[r#"
            default-scheduler
            filter: NodeUnschedulable NodeName TaintToleration NodeAffinity NodePorts NodeResourcesFit VolumeRestrictions NodeVolumeLimits VolumeBinding VolumeZone PodTopologySpread InterPodAffinity DynamicResources NodeDeclaredFeatures
            score: TaintToleration=3 NodeAffinity=2 NodeResourcesFit=1 PodTopologySpread=2 InterPodAffinity=2 DynamicResources=2 NodeResourcesBalancedAllocation=1 ImageLocality=1
            postFilter: DynamicResources DefaultPreemption
            bind: DefaultBinder
        "#]],
    );
}

#[test]
fn profiles_select_and_weight_plugins() {
    check(
        "
profiles:
- schedulerName: default-scheduler
- schedulerName: packed
  plugins:
    multiPoint:
      disabled:
      - name: ImageLocality
    score:
      enabled:
      - name: NodeResourcesFit
        weight: 7
      disabled:
      - name: PodTopologySpread
    filter:
      disabled:
      - name: '*'
      enabled:
      - name: NodeName
  pluginConfig:
  - name: NodeResourcesFit
    args:
      scoringStrategy:
        type: MostAllocated
",
        expect![[r#"
            default-scheduler
            filter: NodeUnschedulable NodeName TaintToleration NodeAffinity NodePorts NodeResourcesFit VolumeRestrictions NodeVolumeLimits VolumeBinding VolumeZone PodTopologySpread InterPodAffinity DynamicResources NodeDeclaredFeatures
            score: TaintToleration=3 NodeAffinity=2 NodeResourcesFit=1 PodTopologySpread=2 InterPodAffinity=2 DynamicResources=2 NodeResourcesBalancedAllocation=1 ImageLocality=1
            postFilter: DynamicResources DefaultPreemption
            bind: DefaultBinder
            packed
            filter: NodeName
            score: NodeResourcesFit=7 TaintToleration=3 NodeAffinity=2 InterPodAffinity=2 DynamicResources=2 NodeResourcesBalancedAllocation=1
            postFilter: DynamicResources DefaultPreemption
            bind: DefaultBinder
        "#]],
    );
}

#[test]
fn rejects_invalid_configuration() {
    check("percentageOfNodesToScore: 101", expect!["percentageOfNodesToScore: not in valid range [0-100]"]);
    check("profiles:\n- schedulerName: a\n- {}\n", expect!["profiles[1].schedulerName: Required value"]);
    check(
        "profiles:\n- plugins:\n    score:\n      enabled:\n      - name: Missing\n",
        expect![[r#"profile "default-scheduler": plugin "Missing" is not known"#]],
    );
    check(
        "profiles:\n- plugins:\n    bind:\n      disabled:\n      - name: '*'\n",
        expect![[
            r#"profile "default-scheduler": profile "default-scheduler" needs at least one bind plugin"#
        ]],
    );
    let wrong = Config::read("apiVersion: v1\nkind: Pod").map(drop).map_err(|error| error.to_string());
    expect![[r#"no kind "Pod" is registered for version "v1""#]].assert_eq(&wrong.unwrap_err());
}
